"""The process groups of a mesh of one axis, or of two: replicate, shard."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks over which this rank's copy is cut: all of them, or those of its replica."""
    return mesh.get_group(mesh.ndim - 1)


def every_rank(mesh: DeviceMesh) -> dist.ProcessGroup:
    """All ranks of the mesh, which are all that there are."""
    if mesh.ndim == 1:
        return mesh.get_group()
    world = dist.group.WORLD
    assert world is not None, "a mesh is made of ranks that a process group has"
    return world
