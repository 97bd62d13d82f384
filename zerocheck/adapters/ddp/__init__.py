"""torch's DistributedDataParallel: nothing is sharded (ZeRO-0).

- `adapter.py`: torch's DistributedDataParallel with AdamW
- `collectives.py`: collectives of torch's DistributedDataParallel
- `layout.py`: layout of DDP, from shapes alone
- `refusals.py`: cases that DDP cannot run, with the reason, known from the case alone
- `script.py`: text that wraps a model in DistributedDataParallel, as a user of torch writes it
"""
