"""torch's FullyShardedDataParallel (FSDP1): flat parameters, one per unit, cut over the ranks."""

from .sharder import Fsdp1, Fsdp1GradOp, Fsdp1NoShard

__all__ = ["Fsdp1", "Fsdp1GradOp", "Fsdp1NoShard"]
