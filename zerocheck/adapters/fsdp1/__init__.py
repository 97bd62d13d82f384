"""torch's FullyShardedDataParallel (FSDP1): sharded flat parameters, one per unit.

- `adapter.py`: torch's FullyShardedDataParallel with AdamW, by its sharding strategy
- `checkpoint.py`: checkpoints of FSDP1 by its own state-dict types
- `collectives.py`: collectives of torch's FSDP1: its rules, replayed on the trace of the bare model
- `layout.py`: layouts of FSDP1 by its strategy, from shapes alone: flat parameters with padding
- `refusals.py`: cases that FSDP1 cannot run, with the reason, known from the case alone
- `script.py`: text that wraps a model in FullyShardedDataParallel
"""
