"""Sums over samples are taken in any order: what a compiler makes of them is no violation."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from wrong_reductions import after_backward, multiplied

import zerocheck
from zerocheck.attached.verdict.summation_noise import SumNoise, as_summed

SAMPLES = 1 << 14


class SerialBias(torch.autograd.Function):
    """An addition of a bias whose gradient is summed one sample after the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim = dim
        shape = [1] * x.dim()
        shape[dim] = -1
        return x + bias.view(shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows = gradient.movedim(ctx.dim, -1).flatten(0, -2)
        return gradient, rows.cumsum(0)[-1], None


class Net(nn.Module):
    """A layer and a head. serial: with the bias of the head summed serially."""

    def __init__(self, kind: str, serial: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.serial = kind, serial
        self.layer = nn.Linear(8, 16)
        self.head: Any = nn.Conv2d(4, 5, 1) if kind == "convolution" else nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.layer(x))
        if self.kind == "convolution":
            hidden = hidden.view(-1, 4, 2, 2)
            out = self._with_bias(F.conv2d(hidden, self.head.weight), 1, hidden)
        else:
            out = self._with_bias(F.linear(hidden, self.head.weight), -1, hidden)
        return out.square().mean() if self.kind == "loss" else out

    def _with_bias(self, out: torch.Tensor, dim: int, hidden: torch.Tensor) -> torch.Tensor:
        if not self.serial:
            return self.head(hidden)
        return SerialBias.apply(out, self.head.bias, dim)


def checked(tmp_path: Path, model: nn.Module, kind: str, error: float = 0.0) -> zerocheck.Attached:
    """Train one step. error: relative, of the gradient of the last bias."""
    optimizer = torch.optim.AdamW(model.parameters())
    check = zerocheck.attach(
        model,
        optimizer,
        reference=lambda: Net(kind),
        steps=(1,),
        directory=tmp_path,
        on_violation="warn",
    )
    torch.manual_seed(1)
    x = torch.randn(16, SAMPLES // 16, 8) if kind == "three dims" else torch.randn(SAMPLES, 8)
    with after_backward(partial(multiplied, model.head, 1 + error)), check.step():
        out = model(x)
        target = torch.zeros_like(out).uniform_(-1, 1)
        (out if kind == "loss" else (out - target).square().mean()).backward()
        optimizer.step()
    return check


@pytest.mark.parametrize("kind", ["two dims", "three dims", "convolution", "loss"])
def test_another_order_of_a_sum_holds(tmp_path: Path, kind: str) -> None:
    last = checked(tmp_path, Net(kind, serial=True), kind).last
    assert last is not None and last.statuses["gradient"] == "holds", last.violations
    assert 0.0 < last.share["gradient"] < 0.5
    wrong = checked(tmp_path, Net(kind, serial=True), kind, error=0.01).last
    assert wrong is not None and wrong.statuses["gradient"] == "violated"


@pytest.mark.long
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="no compiler")
def test_what_inductor_sums_holds(tmp_path: Path) -> None:
    model = Net("two dims")
    model.compile(dynamic=False)
    last = checked(tmp_path, model, "two dims").last
    assert last is not None and last.statuses["gradient"] == "holds", last.violations


def test_an_element_moves_by_what_the_sum_up_to_it_rounds() -> None:
    gradient = torch.tensor([[1.0, -1.0], [2.0, 1.0], [-3.0, 4.0]])
    draw = torch.Generator().manual_seed(0)
    apart = as_summed(gradient, -1, 0.125, draw) - gradient
    assert torch.equal(apart.abs(), 0.125 * torch.tensor([[1.0, 1.0], [3.0, 0.0], [0.0, 4.0]]))
    across = as_summed(gradient, 0, 0.125, draw) - gradient
    assert torch.equal(across.abs(), 0.125 * torch.tensor([[1.0, 0.0], [2.0, 3.0], [3.0, 1.0]]))
    assert as_summed(gradient[:0], -1, 0.125, draw).shape == (0, 2)


def test_long_sums_go_on_from_piece_to_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerocheck.attached.verdict.summation_noise.AT_ONCE", 8)
    gradient = torch.ones(3, 7, 4)
    apart = as_summed(gradient, -1, 0.5, torch.Generator().manual_seed(0)) - gradient
    wanted = torch.arange(1.0, 22.0).view(3, 7, 1).expand(3, 7, 4)
    assert torch.equal(apart.abs(), 0.5 * wanted)
    assert (apart > 0).any() and (apart < 0).any()


def test_of_a_scalar_it_is_what_the_last_module_returned_that_moves() -> None:
    model, x = Net("loss"), torch.randn(64, 8)
    found = []
    for unit in (0.0, 0.5):
        with SumNoise(unit, 0).watching(model) as noisy:
            loss = model(x)
            ((output, given),) = noisy.moved([(loss, torch.ones(()))])
        assert float(given) == 1
        output.backward(given)
        found.append(model.head.bias.grad.clone())
        model.zero_grad()
    assert not torch.isclose(*found).any()
    assert not model.head._forward_hooks
