"""Models whose ranks exchange more than what wraps them does, and what looks like it."""

from __future__ import annotations

from typing import Any

import scenarios
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerocheck


class _SumsInBackward(torch.autograd.Function):
    """Identity whose gradient is summed over ranks, as at the entry of a parallel region."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        whole = gradient.clone()
        dist.all_reduce(whole)
        return whole


def exchanged(x: torch.Tensor, kind: str) -> torch.Tensor:
    parts = [one.contiguous() for one in x.chunk(dist.get_world_size(), 1)]
    into = [torch.empty_like(parts[0]) for _ in parts]
    if kind == "all_to_all":
        return torch.cat(differentiable.all_to_all(into, parts), 1)
    if kind == "detached":
        dist.all_to_all(into, [one.detach() for one in parts])
        return x + torch.cat(into, 1)
    if kind == "functional":
        return functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)[: len(x)]
    if kind == "backward":
        return _SumsInBackward.apply(x)  # type: ignore[no-any-return]
    if kind == "metric":
        count = x.detach().square().mean()
        dist.all_reduce(count)
    return x


class Exchange(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return exchanged(x, self.kind)


def exchanging(kind: str, wrap: str, *, directory: str) -> dict[str, Any]:
    """Two steps, with a reference that exchanges nothing. kind: of the exchange, "outside" for one
    between forward and backward."""
    model = scenarios.net()
    model[2] = Exchange(kind)
    model = scenarios.WRAPS[wrap](model)

    def factory() -> nn.Module:
        plain = scenarios.net()
        plain[2] = Exchange("")
        return plain

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    check = zerocheck.attach(
        model, optimizer, reference=factory, directory=directory, on_violation="warn"
    )
    for _ in range(2):
        with check.step():
            out = model(scenarios.batch())
            if kind == "outside":
                dist.all_reduce(torch.ones(8))
            out.square().mean().backward()
            if kind == "outside":
                dist.all_reduce(torch.ones(8))
            optimizer.step()
            optimizer.zero_grad()
    return {**scenarios.answer(check), "summary": check.summary}


class Experts(nn.Module):
    """Its weight is another on each rank, and so is its gradient."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        rank = dist.get_rank() if own else 0
        self.weight = nn.Parameter(torch.eye(10) * (1 + rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def experts(
    wrap: str, *, directory: str, own: bool = True, ignored: bool = True, fault: str = ""
) -> dict[str, Any]:
    """own: ranks have other values; ignored: the wrapper leaves the weight out; fault: an update of
    rank 1 that is wrong, of that weight ("own") or of another parameter ("other")."""
    model: Any = scenarios.net()
    model[2] = Experts(own)
    if wrap == "ddp":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, ["2.weight"] if ignored else []
        )
        wrapped: Any = DistributedDataParallel(model)
    else:
        wrapped = fully_shard(model, ignored_params={model[2].weight} if ignored else set())

    def factory() -> nn.Module:
        plain = scenarios.net()
        plain[2] = Experts(own)
        return plain

    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    check = zerocheck.attach(
        wrapped, optimizer, reference=factory, directory=directory, on_violation="warn"
    )
    for _ in range(2):
        with check.step():
            wrapped(scenarios.batch()).square().mean().backward()
            nn.utils.clip_grad_norm_([model[0].bias], 1.0)
            optimizer.step()
            if fault and dist.get_rank() == 1:
                chosen = model[2].weight if fault == "own" else model[0].bias
                with torch.no_grad():
                    scenarios.local(chosen).add_(1.0)
            optimizer.zero_grad()
    return {**scenarios.answer(check), "summary": check.summary}
