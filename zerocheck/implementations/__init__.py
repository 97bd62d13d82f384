"""Built-in implementations: adapters of torch and DeepSpeed, and the textbook ZeRO.

- `account.py`: arithmetic of memory layouts: which tensors have gradients and states when
- `casting.py`: mixed precision of torch's DDP and FSDP
- `compiling.py`: torch.compile, as `case.training.compile` names its backend
- `ddp.py`: torch's DistributedDataParallel: nothing is sharded (ZeRO-0)
- `ddp_bytes.py`: layouts of DDP and of DDP with ZeroRedundancyOptimizer, from shapes alone
- `fsdp2.py`: torch's FSDP2 (`fully_shard`) with an optimizer over DTensors: ZeRO-3
- `fsdp2_bytes.py`: layout of FSDP2, from shapes alone
- `full_checkpoint.py`: single-file checkpoints: rank 0 writes, every rank reads
- `limits.py`: reasons to reject cases that built-in implementations cannot run
- `meshes.py`: process groups of a mesh of one axis, or of two: replicate, shard
- `scaling.py`: torch's own dynamic loss scaling
- `sync.py`: schedule of gradient reductions (`case.sharding.sync`) for torch's implementations
- `tensor_parallel.py`: tensor parallelism next to FSDP2: torch's `parallelize_module`
- `units.py`: choice of units: modules whose parameters are gathered, used and released together
- `zero_redundancy.py`: torch's ZeroRedundancyOptimizer over DDP: sharded states (ZeRO-1)
- `collectives/`: collectives and live memory, predicted
- `deepspeed/`: DeepSpeed's ZeRO
- `fsdp1/`: torch's FullyShardedDataParallel (FSDP1)
- `textbook/`: ZeRO-1, -2 and -3, written to be read
"""
