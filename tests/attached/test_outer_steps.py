"""Steps around a step: what an outer optimizer, or SAM, does beside the judged update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import PostLocalSGDOptimizer

import zerocheck
from zerocheck.attached.watching.watch import MOVED


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


class Outer(torch.optim.Optimizer):
    """Holds an optimizer of the same parameters."""

    def __init__(self, fast: torch.optim.Optimizer) -> None:
        super().__init__(fast.param_groups, {})
        self.fast = fast
        self.param_groups = fast.param_groups


class SlowAndFast(Outer):
    """Pulls the parameters back to the average of where they have been, every second step."""

    def __init__(self, fast: torch.optim.Optimizer) -> None:
        super().__init__(fast)
        self.count = 0
        self.slow = [one.detach().clone() for one in self.parameters]

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [one for group in self.param_groups for one in group["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.fast.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            with torch.no_grad():
                for one, slow in zip(self.parameters, self.slow, strict=True):
                    one.copy_(slow.lerp_(one, 0.5))


class Decays(torch.optim.AdamW):
    """A wrong AdamW."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for one in group["params"]:
                    one.mul_(0.999)
        return super().step(closure)


def trained(
    optimizer: Callable[[nn.Module], Any],
    where: Path,
    step: Callable[[nn.Module, Any, torch.Tensor], None],
    *,
    reference: Callable[[], nn.Module] | None = net,
) -> zerocheck.Attached:
    model = net()
    outer = optimizer(model)
    check = zerocheck.attach(
        model, outer, reference=reference, directory=where, on_violation="warn", every=1
    )
    for _ in range(4):
        with check.step():
            step(model, outer, torch.randn(16, 8))
            outer.zero_grad()
    return check


def plain(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()


def sharpness_aware(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    """The gradient is taken at moved parameters."""
    model(x).square().mean().backward()
    with torch.no_grad():
        moves = [0.05 * one.grad for one in model.parameters() if one.grad is not None]
        for one, move in zip(model.parameters(), moves, strict=True):
            one.add_(move)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    with torch.no_grad():
        for one, move in zip(model.parameters(), moves, strict=True):
            one.sub_(move)
    optimizer.step()


def penalized(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    x.requires_grad_()
    loss = model(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.norm()).backward()
    optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def wrong(model: nn.Module) -> torch.optim.Optimizer:
    return Decays(model.parameters(), lr=1e-2)


def test_the_inner_step_is_judged(tmp_path: Path) -> None:
    check = trained(lambda model: SlowAndFast(adamw(model)), tmp_path, plain)
    assert not check.wrong and check.last is not None, check.summary
    assert check.last.statuses["gradient"] == check.last.statuses["update"] == "holds"
    words = "SlowAndFast changes every tensor after the step of AdamW, which is judged"
    assert check.last.unjudged == {"update": words}
    assert f"not judged in 2 of them: update: {words}" in check.summary


def test_a_wrong_inner_step_is_found(tmp_path: Path) -> None:
    check = trained(lambda model: SlowAndFast(wrong(model)), tmp_path, plain)
    assert check.wrong == 4 and "after optimizer.step()" not in check.summary


@pytest.mark.parametrize("reference", [net, None])
def test_moved_parameters(tmp_path: Path, reference: Any) -> None:
    """The update begins where the parameters are when the optimizer takes its step."""
    check = trained(adamw, tmp_path, sharpness_aware, reference=reference)
    assert not check.wrong and check.last is not None, check.summary
    assert check.last.statuses["update"] == "holds"
    assert check.last.unjudged == ({"gradient": MOVED} if reference else {})


def test_a_wrong_update_of_moved_parameters(tmp_path: Path) -> None:
    assert trained(wrong, tmp_path, sharpness_aware).wrong == 4


def test_a_penalty_on_a_gradient_is_not_judged(tmp_path: Path) -> None:
    check = trained(adamw, tmp_path, penalized)
    assert not check.wrong and check.last is not None, check.summary
    assert [*check.last.unjudged] == ["gradient"] and check.last.statuses["update"] == "holds"
    assert trained(wrong, tmp_path, penalized).wrong == 4


def test_averages_between_local_steps_are_refused(tmp_path: Path) -> None:
    model = net()
    optimizer = PostLocalSGDOptimizer(adamw(model), None)  # type: ignore[no-untyped-call]
    with pytest.raises(zerocheck.errors.UsageError, match="each rank trains parameters of its own"):
        zerocheck.attach(model, optimizer, directory=tmp_path)
