"""The autocast in a forward that was put on a compiled module, as accelerate does it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from wrong_reductions import after_backward, multiplied

import zerocheck
from zerocheck.attached.record.forwards import declared_autocast

BF16 = ("cpu", torch.bfloat16)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


class InFp32:
    """A callable that casts outputs, with the function in it."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any) -> torch.Tensor:
        return self.function(*args).float()


def cast(model: nn.Module) -> nn.Module:
    inner = InFp32(torch.autocast("cpu", torch.bfloat16)(type(model).forward))

    def forward(*args: Any) -> torch.Tensor:
        return inner(*args)

    forward.__wrapped__ = inner
    model.forward = MethodType(forward, model)
    return model


def compiled_whole(model: nn.Module) -> nn.Module:
    return torch.compile(cast(model), backend="eager")


def compiled_in_part(model: nn.Module) -> nn.Module:
    model[0].compile(backend="eager")
    return cast(model)


def trained(model: nn.Module, tmp_path: Path, factor: float = 1.0) -> zerocheck.Attached:
    optimizer = torch.optim.AdamW(model.parameters())
    check = zerocheck.attach(
        model, optimizer, reference=make_model, directory=tmp_path, on_violation="warn"
    )
    with after_backward(functools.partial(multiplied, model, factor)), check.step():
        model(torch.randn(32, 8)).square().sum().backward()
        optimizer.step()
    return check


@pytest.mark.parametrize("wrap", [cast, compiled_whole, compiled_in_part])
def test_a_run_in_bf16_holds(tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]) -> None:
    last = trained(wrap(make_model()), tmp_path).last
    assert last is not None and last.statuses["gradient"] == "holds", last.violations
    wrong = trained(wrap(make_model()), tmp_path, factor=2.0).last
    assert wrong is not None and wrong.statuses["gradient"] == "violated"


def test_what_is_read_off_a_forward() -> None:
    model = make_model()
    assert declared_autocast(model) is None
    assert declared_autocast(cast(model)) == BF16
    off = make_model()
    off.forward = torch.autocast("cpu", torch.bfloat16, enabled=False)(off.forward)
    assert declared_autocast(off) is None
    outer = cast(make_model())
    inner = outer.forward
    outer.forward = functools.wraps(inner)(lambda x: inner(x))
    assert declared_autocast(outer) == BF16
    round_ = make_model()
    round_.forward = lambda x: x
    round_.forward.__wrapped__ = round_.forward  # no end
    assert declared_autocast(round_) is None
