"""`attach` judges optimizers whose weight decay is added to the gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decaying import parts

import zerocheck


def decoupled(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a class that shrinks the parameters, and takes the decay out of the gradient."""

    class Decoupled(kind):  # type: ignore[valid-type, misc]
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(1 - group["lr"] * group["weight_decay"])
            return without_decay(self, super().step)

    return Decoupled


def forgetful(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a class that loses the decay, as code that builds groups of its own."""

    class Forgetful(kind):  # type: ignore[valid-type, misc]
        def step(self, closure: Any = None) -> Any:
            return without_decay(self, super().step)

    return Forgetful


def without_decay(optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
    kept = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    result = step()
    for group, decay in zip(optimizer.param_groups, kept, strict=True):
        group["weight_decay"] = decay
    return result


def violated(kind: type[torch.optim.Optimizer], directory: Path, **options: Any) -> str:
    """Return what is said of four steps; empty if all hold."""
    model, optimizer = parts(kind, **options)
    check = zerocheck.attach(model, optimizer, steps=(1, 2, 3, 4), directory=directory)
    try:
        for _ in range(4):
            with check.step():
                model(torch.randn(4, 5)).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    except zerocheck.Violated as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.Adam, {"maximize": True}),
        (torch.optim.Adam, {"decoupled_weight_decay": True}),
        (torch.optim.Adam, {"decoupled_weight_decay": True, "fused": True, "amsgrad": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adagrad, {"fused": True}),
        (torch.optim.Adagrad, {"foreach": True, "maximize": True}),
        (torch.optim.RMSprop, {}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
        (torch.optim.RMSprop, {"alpha": 0.5, "eps": 1e-3, "foreach": True}),
    ],
)
def test_right_steps_hold(
    tmp_path: Path, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    assert violated(kind, tmp_path, **options) == ""


ROLES = {torch.optim.Adam: "exp_avg", torch.optim.Adagrad: "sum", torch.optim.RMSprop: "square_avg"}


@pytest.mark.parametrize("kind", ROLES)
def test_a_decay_elsewhere_is_named(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    wrong = f"{ROLES[kind]} is wrong: weight decay"
    text = violated(decoupled(kind), tmp_path)
    assert f"{wrong} shrank the parameter (decoupled), and is in none of the states" in text
    assert f"{wrong} was not applied" in violated(forgetful(kind), tmp_path)


def test_adam_with_decoupled_decay_is_judged_as_adamw(tmp_path: Path) -> None:
    text = violated(forgetful(torch.optim.Adam), tmp_path, decoupled_weight_decay=True)
    assert "weight decay was not applied" in text and "in none of the states" not in text


def test_the_options_that_were_given_are_those_of_the_step(tmp_path: Path) -> None:
    class OtherAlpha(torch.optim.RMSprop):
        def step(self, closure: Any = None) -> Any:
            kept = [group["alpha"] for group in self.param_groups]
            for group in self.param_groups:
                group["alpha"] = 0.5
            result = super().step(closure)
            for group, alpha in zip(self.param_groups, kept, strict=True):
                group["alpha"] = alpha
            return result

    assert "square_avg is not what RMSprop gives" in violated(OtherAlpha, tmp_path)
