"""Hooks of the script on the model: one that changes something is needed in the reference too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from three_steps import trained
from torch import nn

from zerocheck.attached.record.guard import ErrorGuard
from zerocheck.attached.record.model_hooks import HookWatch
from zerocheck.cli import main

Model = Any


def make_model() -> Model:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(32, 16), nn.Linear(16, 4))


def rows_kept(model: Model) -> None:
    rows = (torch.arange(20) >= 15).float()[:, None]
    model[0].weight.register_hook(lambda gradient: gradient * rows)


def halve(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def after_accumulation(model: Model) -> None:
    model[3].weight.register_post_accumulate_grad_hook(halve)


class Doubling:
    def __call__(self, module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    def before(self, module: nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (given[0] * 2,)


def output_changed(model: Model) -> None:
    model[2].register_forward_hook(Doubling())


def input_changed(model: Model) -> None:
    model[2].register_forward_pre_hook(Doubling().before)


def backward_changed(model: Model) -> None:
    model[3].register_full_backward_hook(
        functools.partial(lambda factor, module, inner, outer: (inner[0] * factor,), 0.5)
    )


CHANGING = (rows_kept, after_accumulation, output_changed, input_changed, backward_changed)


def logged(model: Model) -> None:
    """Hooks of each kind that change nothing."""
    seen: list[Any] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: seen.append(gradient.norm()))
        parameter.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad.norm()))
    for module in model:
        module.register_forward_pre_hook(lambda *given: seen.append(given))
        module.register_forward_hook(lambda *given: given[-1])
        module.register_full_backward_hook(lambda *given: seen.append(given))


def loss(model: Model) -> torch.Tensor:
    return nn.functional.cross_entropy(model(torch.randint(20, (6, 4))), torch.randint(4, (6,)))


def hooked(change: Callable[[Model], None]) -> Model:
    model = make_model()
    change(model)
    return model


@pytest.mark.parametrize("change", CHANGING)
def test_a_gradient_that_a_hook_changes_is_not_judged(
    change: Callable[[Model], None], tmp_path: Path
) -> None:
    last = trained(hooked(change), loss, make_model, tmp_path)
    assert not last.violations
    reason = last.unjudged["gradient"]
    assert "has a hook that changes what is computed" in reason
    assert "(test_model_hooks.py:" in reason and "register it there too" in reason


@pytest.mark.parametrize(("factor", "status"), [(1.0, "holds"), (3.0, "violated")])
@pytest.mark.parametrize("change", [*CHANGING, logged])
def test_with_the_hook_in_the_reference_it_is(
    change: Callable[[Model], None], factor: float, status: str, tmp_path: Path
) -> None:
    """What changes nothing need not be there."""
    reference = make_model if change is logged else lambda: hooked(change)
    last = trained(hooked(change), loss, reference, tmp_path, factor=factor)
    assert last.statuses["gradient"] == status, last


def test_a_replay_does_not_judge_it_either(tmp_path: Path) -> None:
    where = tmp_path / "kept"
    trained(hooked(rows_kept), loss, lambda: hooked(rows_kept), where, factor=3.0)
    folder = next(where.glob("step-*"))
    made = CliRunner().invoke(main, ["replay", str(folder), "--model", f"{__file__}:make_model"])
    assert "has a hook that changes what is computed" in made.output, made.output


def test_hooks_are_as_they_were() -> None:
    """Those that the script removes or adds meanwhile as well."""
    model: Model = make_model()
    handle = model[2].register_forward_hook(Doubling())
    kept = Doubling()
    model[2].register_forward_hook(kept)
    guard = ErrorGuard()
    with HookWatch(guard).watching(model):
        handle.remove()
        added = Doubling()
        model[2].register_forward_hook(added)
        model(torch.zeros(1, 4, dtype=torch.long))
    assert [*model[2]._forward_hooks.values()] == [kept, added]
    assert guard.error is None


def test_hooks_of_compiled_modules_are_not_touched() -> None:
    model: Model = make_model()
    output_changed(model)
    before = dict(model[2]._forward_hooks)
    with HookWatch(ErrorGuard()).watching(torch.compile(model, backend="eager")):
        assert dict(model[2]._forward_hooks) == before
