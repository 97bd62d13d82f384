"""torch's FullyShardedDataParallel (FSDP1): sharded flat parameters, one per unit.

- `bytes.py`: layouts of FSDP1 by its strategy, from shapes alone: flat parameters with padding
- `checkpoint.py`: checkpoints of FSDP1 by its own state-dict types
- `refusals.py`: cases that FSDP1 cannot run, with the reason, known from the case alone
- `sharder.py`: torch's FullyShardedDataParallel, by its sharding strategy
"""

from .sharder import Fsdp1, Fsdp1GradOp, Fsdp1NoShard

__all__ = ["Fsdp1", "Fsdp1GradOp", "Fsdp1NoShard"]
