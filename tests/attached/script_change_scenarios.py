"""Scripts that change gradients between the backward and the step, right and wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import scenarios
import torch
import torch.distributed as dist
from token_scenarios import reader
from torch import nn
from wrong_reductions import after_backward, multiplied

import zerocheck
from zerocheck.attached.record.holdings import local


def adaptive(model: nn.Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        if parameter.grad is not None:
            local(parameter.grad).mul_(1 / (2 + number))


def limited(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:  # FSDP1 leaves a rank without a part of it
            local(parameter.grad).clamp_(-0.01, 0.01)


def noisy(model: nn.Module) -> None:
    draw = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.grad is not None:
            shard = local(parameter.grad)
            shard.add_(torch.randn(shard.shape, generator=draw), alpha=1e-3)


def removed(model: nn.Module) -> None:
    list(model.parameters())[-1].grad = None


def by_own_norm(model: nn.Module) -> None:
    """The norm of this rank's shards is that of the whole gradient under DDP alone."""
    grads = [one.grad for one in model.parameters() if one.grad is not None]
    norms = [local(grad).norm() for grad in grads]
    multiplied(model, 0.1 / float(torch.stack(norms).norm()))


def averaged(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())


def summed(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "nothing": lambda model: None,
    "quarter": lambda model: multiplied(model, 0.25),
    "divided by W": lambda model: multiplied(model, 1 / dist.get_world_size()),
    "zeroed": lambda model: multiplied(model, 0.0),
    "adaptive": adaptive,
    "limited": limited,
    "noisy": noisy,
    "removed": removed,
    "by own norm": by_own_norm,
    "averaged": averaged,
    "summed": summed,
}


def changed(
    wrap: str,
    change: str,
    *,
    directory: str,
    fault: bool = False,
    scales: bool = False,
    clips: bool = False,
    alone: bool = True,
) -> dict[str, Any]:
    """Two steps of two microbatches. fault: gradients are summed over ranks, not averaged; scales:
    with a GradScaler; clips: after the change; alone: the first microbatch is not reduced."""
    model: Any = scenarios.WRAPS[wrap](scenarios.net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, enabled=scales)
    check = zerocheck.attach(
        model, optimizer, reference=scenarios.net, directory=directory, on_violation="warn"
    )
    last = False
    factor = dist.get_world_size() if fault else 1

    def spoil() -> None:
        if last and fault:
            multiplied(model, factor)

    for _ in range(2):
        with after_backward(spoil), check.step():
            for last in (False, True):
                local_only = alone and not last and hasattr(model, "no_sync")
                with model.no_sync() if local_only else nullcontext():
                    loss = model(scenarios.batch() + last).square().mean() / 2
                    scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            CHANGES[change](model)
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return {**scenarios.answer(check), "summary": check.summary}


def scaled_by_tokens(wrap: str, divisor: str, *, directory: str, declared: bool) -> dict[str, Any]:
    """Losses are summed over tokens, and gradients are scaled by W / tokens; divisor: "right",
    "without ranks", or "own tokens" of each rank."""
    model = scenarios.WRAPS[wrap](reader())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weight: Any = "token" if declared else "microbatch"
    check = zerocheck.attach(
        model,
        optimizer,
        reference=reader,
        semantics=zerocheck.Semantics(weight=weight),
        directory=directory,
        on_violation="warn",
    )
    size, rank = dist.get_world_size(), dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    for _ in range(2):
        x = torch.randint(23, (4, 9), generator=draw)
        target = x.roll(-1, 1)
        target[:, : 2 + 3 * rank] = -100
        tokens = (target != -100).sum()
        with check.step():
            out = model(x).flatten(0, 1)
            nn.functional.cross_entropy(out, target.flatten(), reduction="sum").backward()
            if divisor != "own tokens":
                dist.all_reduce(tokens)
            factor = 1 if divisor == "without ranks" else size
            multiplied(model, factor / float(tokens))
            optimizer.step()
            optimizer.zero_grad()
    return {
        **scenarios.answer(check),
        "summary": check.summary,
        "texts": [one.explanation for one in check.last.violations],
    }
