"""Tensor parallelism by hand: norms of parts of a sequence; and a bias that the script moves."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from scenarios import answer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zerocheck
from zerocheck.attached.record.holdings import local


class Parts(torch.autograd.Function):
    """Gather what ranks have of the sequence; they do the same with it, so each has its part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> Any:
        return mine(gradient[0], ctx.group), None


class Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return mine(x, group)

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> Any:
        return Parts.forward(ctx, gradient[0], ctx.group), None


def mine(x: torch.Tensor, group: Any) -> torch.Tensor:
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


class Normed(nn.Module):
    """Without a group: the plain model. counts: of what the bias is moved by."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm, self.head = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 5)
        self.register_buffer("bias", torch.zeros(16))
        self.register_buffer("counts", torch.zeros(16), persistent=False)
        self.statistics = nn.BatchNorm1d(6)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.statistics(x.flatten(0, 1).detach())
        x = self.stem(x)
        self.counts.add_((x.detach() > 0).float().sum((0, 1)))
        x = self.norm(x if self.group is None else Part.apply(x, self.group))
        x = x if self.group is None else Parts.apply(x, self.group)
        return self.head(x + self.bias)  # type: ignore[no-any-return]


def gathered(*, directory: str, fault: str = "", first: int = 1) -> dict[str, Any]:
    """Steps on two times two ranks. first: of those that are checked."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh.get_group("tp")
    model = fully_shard(Normed(tp), mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    check = zerocheck.attach(
        model,
        optimizer,
        reference=Normed,
        mesh=mesh,
        directory=directory,
        on_violation="warn",
        steps=(first,),
    )
    torch.manual_seed(mesh.get_local_rank("dp"))
    for _ in range(first):
        with check.step():
            x, y = torch.randn(4, 8, 6), torch.randn(4, 8, 5)
            F.mse_loss(model(x), y).backward()
            for name, one in model.norm.named_parameters():
                assert one.grad is not None
                if fault != "bias" or name != "bias":
                    dist.all_reduce(local(one.grad), group=tp)
                if fault == "averaged":
                    local(one.grad).div_(2)
            optimizer.step()
            optimizer.zero_grad()
            if fault != "counts":
                dist.all_reduce(model.counts)
            model.bias.add_(0.001 * (model.counts.mean() - model.counts))
            model.counts.zero_()
    return {**answer(check), "summary": check.summary}
