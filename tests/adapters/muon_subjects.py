"""A user's own Muon over FSDP2's shards: a wrong one, which never gathers, and a right one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zerocheck
from zerocheck.case.schema import Case
from zerocheck_reference import adjusted, orthogonalized


class LocalMuon(torch.optim.Optimizer):
    """Muon of whatever this rank holds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                ahead = p.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
                mine = self.rows(ahead, group)
                local = p.to_local()
                local.mul_(1 - group["lr"] * group["weight_decay"]).sub_(mine)

    def rows(self, ahead: DTensor, group: dict[str, Any]) -> torch.Tensor:
        """Return this rank's part of the update."""
        local = ahead.to_local()
        if not local.numel():
            return local
        rate = group["lr"] * adjusted(local.shape, group["adjust_lr_fn"])
        return orthogonalized(local).float() * rate


class WholeMuon(LocalMuon):
    """Muon of whole matrices."""

    def rows(self, ahead: DTensor, group: dict[str, Any]) -> torch.Tensor:
        rate = group["lr"] * adjusted(ahead.shape, group["adjust_lr_fn"])
        whole = orthogonalized(ahead.full_tensor()).float() * rate
        rank, size = ahead.device_mesh.get_local_rank(), ahead.device_mesh.size()
        each = -(-whole.shape[0] // size)
        return whole[rank * each : (rank + 1) * each]


def _built(kind: type[LocalMuon], model: nn.Module, case: Case, mesh: DeviceMesh) -> Any:
    fully_shard(model, mesh=mesh)
    adamw = torch.optim.AdamW(zerocheck.groups(model, case, "adamw"))
    return zerocheck.Built(model, [kind(zerocheck.groups(model, case, "muon")), adamw])


def local(model: nn.Module, case: Case, mesh: DeviceMesh) -> Any:
    return _built(LocalMuon, model, case, mesh)


def whole(model: nn.Module, case: Case, mesh: DeviceMesh) -> Any:
    return _built(WholeMuon, model, case, mesh)
