"""A step of the optimizer that is compiled: its bias corrections are computed in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerocheck


def whole(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    return optimizer.step


def within(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    @torch.compile(backend="eager")
    def update() -> None:
        optimizer.step()

    return update


def trained(
    tmp_path: Path, compiled: Callable[..., Callable[[], Any]], error: float, **options: Any
) -> zerocheck.Attached:
    """Train four steps. error: relative, of the learning rate of the last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **options)
    step = compiled(optimizer)
    check = zerocheck.attach(
        model, optimizer, steps=range(1, 5), directory=tmp_path, on_violation="warn"
    )
    for number in range(4):
        with check.step():
            model(torch.randn(16, 8)).square().sum().backward()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            step()
            if number == 3:
                for parameter, was in zip(model.parameters(), before, strict=True):
                    parameter.data += error * (parameter.data - was)
            optimizer.zero_grad()
    return check


@pytest.mark.every(3)
@pytest.mark.parametrize("compiled", [whole, within])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"betas": (0.9, 0.95)}], ids=str)
def test_it_holds(
    tmp_path: Path, compiled: Callable[..., Callable[[], Any]], options: dict[str, Any]
) -> None:
    right = trained(tmp_path, compiled, 0.0, **options)
    assert right.last is not None and right.wrong == 0, right.last
    wrong = trained(tmp_path, compiled, 1e-3, **options)
    assert wrong.last is not None and wrong.wrong == 1
    assert wrong.last.statuses["update"] == "violated"
