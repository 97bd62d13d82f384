"""torch's FSDP2 (`fully_shard`): sharded parameters, each along its dim 0 (ZeRO-3).

- `adapter.py`: torch's FSDP2 with AdamW over DTensors
- `collectives.py`: collectives of torch's FSDP2: its rules, replayed on the trace of the bare model
- `gathered_muon.py`: Muon of FSDP2's shards, written to be read: the momentum is gathered, every
  rank orthogonalizes
- `layout.py`: layout of FSDP2, from shapes alone: dim 0 of each parameter in chunks of one size
- `refusals.py`: cases that FSDP2 cannot run, with the reason, known from the case alone
- `script.py`: text that shards a model with `fully_shard`, as a user of torch writes it
- `tensor_parallel.py`: tensor parallelism next to FSDP2: torch's `parallelize_module`
"""
