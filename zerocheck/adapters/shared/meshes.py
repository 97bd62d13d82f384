"""Process groups of a device mesh, by the names of its axes."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group over which this rank's copy is sharded: all ranks, or its replica."""
    return mesh.get_group("shard")


def replicate_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the group of ranks that hold the same shards, or None without a replicate axis."""
    return mesh.get_group("replicate") if "replicate" in (mesh.mesh_dim_names or ()) else None


def every_rank(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of all ranks of the mesh, which is the whole world."""
    if replicate_group(mesh) is None:
        return shard_group(mesh)
    world = dist.group.WORLD
    assert world is not None, "a mesh is made of ranks that a process group has"
    return world
