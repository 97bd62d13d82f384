"""How this project shards: FSDP2, with gradients that it averages itself."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import zerocheck


def shard(model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, *, reshard: bool) -> None:
    """Each block is a unit, and so is the rest. Ranks sum gradients and divide by their number."""
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(float(mesh.size()))


class MyFSDP(zerocheck.BuiltImplementation):
    """The sharding of this project, as zerocheck runs it. Training itself needs none of this."""

    options = ("reshard",)

    def build(self, model: nn.Module, case, mesh: DeviceMesh) -> zerocheck.Built:
        shard(model, list(model.blocks), mesh, reshard=case.sharding.reshard)
        return zerocheck.Built(model, torch.optim.AdamW(zerocheck.groups(model, case)))
