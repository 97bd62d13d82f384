"""`attach` judges Adam, whose weight decay is in the gradient of its moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decaying import parts

import zerocheck


class AdamDecoupled(torch.optim.Adam):
    """Shrinks the parameters itself, and takes the decay out of the gradient."""

    def step(self, closure: Any = None) -> Any:
        kept = [group["weight_decay"] for group in self.param_groups]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                group["weight_decay"] = 0.0
        result = super().step(closure)
        for group, decay in zip(self.param_groups, kept, strict=True):
            group["weight_decay"] = decay
        return result


class AdamWithoutDecay(torch.optim.Adam):
    """Loses the decay, as code that builds groups of its own."""

    def step(self, closure: Any = None) -> Any:
        kept = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            group["weight_decay"] = 0.0
        result = super().step(closure)
        for group, decay in zip(self.param_groups, kept, strict=True):
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
    "options", [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}, {"maximize": True}]
)
def test_right_steps_hold(tmp_path: Path, options: dict[str, Any]) -> None:
    assert violated(torch.optim.Adam, tmp_path, **options) == ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            AdamDecoupled,
            "weight decay shrank the parameter (decoupled), and is in none of the states",
        ),
        (AdamWithoutDecay, "weight decay was not applied"),
    ],
)
def test_a_decay_elsewhere_is_named(
    tmp_path: Path, kind: type[torch.optim.Optimizer], words: str
) -> None:
    text = violated(kind, tmp_path)
    assert f"exp_avg is wrong: {words}" in text, text
