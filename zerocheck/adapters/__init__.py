"""Adapters: implementations of torch, DeepSpeed and trainers, and the textbook ZeRO.

Each is a folder: `adapter.py` is the implementation. Where it needs them, `refusals.py` has the
cases that it cannot run, `layout.py` and `collectives.py` predict its bytes and calls. These
packages import nothing themselves: the command line starts without torch.

- `accelerate/`: what a config of Hugging Face accelerate makes
- `ddp/`: torch's DistributedDataParallel: nothing is sharded (ZeRO-0)
- `deepspeed/`: DeepSpeed's ZeRO
- `fsdp1/`: torch's FullyShardedDataParallel
- `fsdp2/`: torch's `fully_shard`
- `lightning/`: what a config of LightningCLI, or a strategy of Lightning, makes
- `shared/`: parts that several adapters share
- `textbook/`: ZeRO-1, -2 and -3, written to be read
- `transformers/`: what a Trainer makes of TrainingArguments
- `zero_redundancy/`: torch's ZeroRedundancyOptimizer over DDP (ZeRO-1)
"""
