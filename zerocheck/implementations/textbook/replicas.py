"""Replication: copies of the sharded model, on the replicate axis of a mesh.

On a mesh (R, S) each of R replicas is cut over its own S ranks as on a mesh of one axis, and has
samples of its own. So all that the stages do stays within a replica, but for one all-reduce per
step: the shards of the gradient are averaged over the ranks that hold the same shard.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class Replicas:
    """Ranks that hold the same shards as this one; only itself on a mesh of one axis."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group(0) if mesh.ndim > 1 else None
        self.count = self.group.size() if self.group is not None else 1

    @property
    def first(self) -> bool:
        """True if this rank is in the first replica, which writes the checkpoint for all."""
        return self.group is None or self.group.rank() == 0

    def average(self, shards: Iterable[torch.Tensor]) -> None:
        """Replace shards of the gradient by their mean over replicas, all in flight at once."""
        if self.count == 1:
            return
        launched = [
            (dist.all_reduce(shard, group=self.group, async_op=True), shard) for shard in shards
        ]
        for work, shard in launched:
            if work is not None:
                work.wait()
            shard.div_(self.count)
