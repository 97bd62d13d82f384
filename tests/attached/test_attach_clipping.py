"""Each way of torch to clip, under each of its names: right runs hold, wrong ones are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import zerocheck
from zerocheck.compat import clip_functions

Clip = Callable[[list[nn.Parameter]], None]


def in_two_calls(parameters: list[nn.Parameter]) -> None:
    """As torchtitan clips."""
    norm = get_total_norm([one.grad for one in parameters if one.grad is not None])
    clip_grads_with_norm_(parameters, max_norm=0.05, total_norm=norm)


def value_then_norm(parameters: list[nn.Parameter]) -> None:
    clip_grad_value_(parameters, 0.01)
    clip_grad_norm_(parameters, 0.02)


def norm_then_value(parameters: list[nn.Parameter]) -> None:
    clip_grad_norm_(parameters, 0.05)
    clip_grad_value_(parameters, clip_value=0.01)


WAYS: dict[str, Clip] = {
    "norm": lambda parameters: clip_grad_norm_(parameters, 0.05) and None,
    "inf": lambda parameters: clip_grad_norm_(parameters, 0.05, norm_type=torch.inf) and None,
    "one by one": lambda parameters: [clip_grad_norm_(one, 0.05) for one in parameters] and None,
    "in two calls": in_two_calls,
    "value": lambda parameters: clip_grad_value_(parameters, 0.01),
    "value then norm": value_then_norm,
    "norm then value": norm_then_value,
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def trained(clip: Clip, directory: Path, **options: Any) -> zerocheck.Attached:  # type: ignore[name-defined]
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    check = zerocheck.attach(
        model, optimizer, reference=make_model, directory=directory, on_violation="warn"
    )
    for _ in range(2):
        with check.step():
            model(torch.randn(4, 4)).square().sum().backward()
            clip([*model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    return check


@pytest.mark.parametrize("way", WAYS)
def test_a_right_clip_holds(way: str, tmp_path: Path) -> None:
    check = trained(WAYS[way], tmp_path)
    assert check.wrong == 0, check.summary
    held = {name for name, status in check.last.statuses.items() if status == "holds"}
    assert held >= {"gradient", "clip", "update"}


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_changes_after_its_clipping_is_found(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def then_doubled(parameters: list[nn.Parameter]) -> None:
        WAYS[way](parameters)
        for one in parameters:
            assert one.grad is not None
            one.grad.mul_(2)

    check = trained(then_doubled, tmp_path)
    said = capsys.readouterr().err
    assert check.wrong == 2 and "  obligation  clip: " in said, said
    assert "  cause       changed after clipping" in said, said
    assert "every element is 2 times what clipping made of it" in said, said
    assert all("0.bias" in one.tensors for one in check.last.violations)


def test_one_parameter_that_changes_after_clipping(tmp_path: Path) -> None:
    def then_changed(parameters: list[nn.Parameter]) -> None:
        clip_grad_norm_(parameters, 0.05)
        assert parameters[-1].grad is not None
        parameters[-1].grad.add_(torch.tensor([0.5, 0.0]))

    (violation,) = trained(then_changed, tmp_path).last.violations
    assert violation.causes == ("changed after clipping",) and violation.tensors == ("2.bias",)
    assert (violation.wrong, violation.total) == (1, 2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled", ["before", "after"])
def test_a_clip_before_the_loss_scale_is_divided_out(
    unscaled: str, fused: bool, tmp_path: Path
) -> None:
    """The limit is then that of the gradient times the loss scale: nearly all is clipped away."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
    check = zerocheck.attach(model, optimizer, directory=tmp_path, on_violation="warn")
    with check.step():
        scaler.scale(model(torch.randn(4, 4)).square().sum()).backward()
        if unscaled == "before":
            scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
    found = [(one.obligation, one.causes) for one in check.last.violations]
    assert found == ([("clip", ("clipped before unscaling",))] if unscaled == "after" else [])


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("value", "elements are not what limits of 0.01 make of them"),
        ("norm", "is not the gradient times the coefficient of its norm"),
        ("in two calls", "is not the gradient times the coefficient of its norm"),
    ],
)
def test_a_wrong_clip_is_found(
    way: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The function below torch's name halves what it has clipped."""
    functions = clip_functions()
    cell = functions.value if way == "value" else functions.multiply
    original = cell.cell_contents

    def halving(parameters: Any, *given: Any, **named: Any) -> Any:
        result = original(parameters, *given, **named)
        for one in parameters:
            one.grad.mul_(0.5)
        return result

    cell.cell_contents = halving
    try:
        check = trained(WAYS[way], tmp_path)
    finally:
        cell.cell_contents = original
    said = capsys.readouterr().err
    assert check.wrong == 2 and "  obligation  clip: " in said, said
    assert words in said, said
