"""Process groups of a mesh of one axis, or of two: replicate, shard."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group over which this rank's copy is sharded: all ranks, or its replica."""
    return mesh.get_group(mesh.ndim - 1)


def every_rank(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of all ranks of the mesh, which is the whole world."""
    if mesh.ndim == 1:
        return mesh.get_group()
    world = dist.group.WORLD
    assert world is not None, "a mesh is made of ranks that a process group has"
    return world
