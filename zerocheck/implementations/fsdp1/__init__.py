"""torch's FullyShardedDataParallel (FSDP1): sharded flat parameters, one per unit."""

from .sharder import Fsdp1, Fsdp1GradOp, Fsdp1NoShard

__all__ = ["Fsdp1", "Fsdp1GradOp", "Fsdp1NoShard"]
