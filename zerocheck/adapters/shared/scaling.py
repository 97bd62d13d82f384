"""torch's own dynamic loss scaling."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from ...case.schema import Case
from .meshes import shard_group


def scaler_of(case: Case, mesh: DeviceMesh) -> torch.amp.GradScaler | None:
    """Return torch's GradScaler if the case uses one, or None.

    It looks for infinities in the gradients that the optimizer has on this rank. That is the same
    on all ranks where gradients are replicated; for DTensors torch takes the maximum over the mesh
    (`found_inf_reduce_handler` in torch/distributed/tensor/_dispatch.py).
    """
    if case.training.loss_scale is None:
        return None
    return torch.amp.GradScaler(mesh.device_type, init_scale=case.training.loss_scale)


def sharded_scaler_of(case: Case, mesh: DeviceMesh) -> ShardedGradScaler | None:
    """Return FSDP1's scaler if the case uses one, or None. Ranks agree on an overflow."""
    if case.training.loss_scale is None:
        return None
    group = shard_group(mesh)  # replicas have the same gradients by then
    scale = case.training.loss_scale
    return ShardedGradScaler(mesh.device_type, init_scale=scale, process_group=group)
