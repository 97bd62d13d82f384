"""Faults that begin in the middle of a run, as they come with a bad patch or a bad machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from zerocheck.attached.record.holdings import local


@contextmanager
def fault(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The fault of this name around one step; none for an empty name."""
    if not name:
        yield
        return
    original = optimizer.step

    def step(*args: Any) -> Any:
        return globals()[name](model, optimizer, original)

    optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        optimizer.step = original  # type: ignore[method-assign]


def clip(model: nn.Module, most: float) -> None:
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(most)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), most)


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


@torch.no_grad()
def moment_scaled(model: nn.Module, optimizer: Any, step: Callable[[], Any]) -> Any:
    """exp_avg is twice what it must be: someone put the loss scale into it."""
    step()
    for parameter in _trained(optimizer):
        local(optimizer.state[parameter]["exp_avg"]).mul_(2)


@torch.no_grad()
def decay_twice(model: nn.Module, optimizer: Any, step: Callable[[], Any]) -> Any:
    """Weight decay by hand, and by AdamW."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                local(parameter).mul_(1 - group["lr"] * group["weight_decay"])
    step()


@torch.no_grad()
def stale_on_one_rank(model: nn.Module, optimizer: Any, step: Callable[[], Any]) -> Any:
    """Rank 1 goes on with one tensor of the step before."""
    parameter = _trained(optimizer)[0]
    old = local(parameter).clone()
    step()
    if dist.get_rank() == 1:
        local(parameter).copy_(old)


@torch.no_grad()
def not_reduced(model: nn.Module, optimizer: Any, step: Callable[[], Any]) -> Any:
    """Rank 1 gives its optimizer another gradient than the others."""
    if dist.get_rank() == 1:
        for parameter in _trained(optimizer):
            local(parameter.grad).mul_(0.75)
    step()


@torch.no_grad()
def parted_before(model: nn.Module, optimizer: Any, step: Callable[[], Any]) -> Any:
    """Once, in a step that nobody checks, a bit flips on rank 1; all steps are right."""
    step()
    if dist.get_rank() == 1 and not getattr(optimizer, "flipped", False):
        optimizer.flipped = True
        bits = local(_trained(optimizer)[0]).view(torch.int32)
        bits.view(-1)[3] ^= 1 << 9


@torch.no_grad()
def frozen_moved(model: nn.Module, optimizer: Any, step: Callable[[], Any]) -> Any:
    """A frozen parameter is decayed."""
    step()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            local(parameter).mul_(0.999)


def other_rate(model: nn.Module, optimizer: Any, step: Callable[[], Any]) -> Any:
    """The schedule of rank 1 is one step behind."""
    rate = optimizer.param_groups[0]["lr"]
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = rate * 1.01
    step()
    optimizer.param_groups[0]["lr"] = rate


def skips_on_one_rank(model: nn.Module, optimizer: Any, step: Callable[[], Any]) -> Any:
    """Rank 1 leaves its update out."""
    if dist.get_rank() != 1:
        step()
