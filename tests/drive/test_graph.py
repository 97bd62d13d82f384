"""The fingerprint of a local computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerocheck.drive.forward_probe import ForwardProbe
from zerocheck.execution.graph import fingerprint
from zerocheck.judge.mirrors import pass_detached, pass_through


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.inner(x).tanh()
        return y


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), _Twice(), nn.Linear(4, 1))


def _print(model: nn.Module) -> str:
    return fingerprint(model(torch.ones(2, 4)).sum())


def test_the_same_operators_in_the_same_order_have_one_fingerprint() -> None:
    assert _print(_model()) == _print(_model())


def _checkpointed(model: Any) -> None:
    forward = model[1].forward
    model[1].forward = lambda x: checkpoint(forward, x, use_reentrant=True)


def _rewritten(model: Any) -> None:
    model[1].forward = lambda x: model[1].inner(x).tanh() + x


def _passed(model: Any) -> None:
    model[1].register_forward_pre_hook(pass_through)


def _other_operator(model: Any) -> None:
    model[1].forward = lambda x: x + model[1].inner(x).sigmoid()


@pytest.mark.parametrize("change", [_checkpointed, _rewritten, _passed, _other_operator])
def test_another_graph_has_another_fingerprint(change: Callable[[Any], None]) -> None:
    model = _model()
    before = _print(model)
    change(model)
    assert _print(model) != before


def _passed_to_one(model: Any) -> None:
    model[2].register_forward_pre_hook(pass_detached)


def _views(model: Any) -> None:
    """Parameters as views of a flat one, as FSDP1 has them."""
    flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in model[0].parameters()]))
    del model[0].weight, model[0].bias
    weight, bias = flat.split([16, 4])
    model[0].weight, model[0].bias = weight.view(4, 4), bias.view(4)


@pytest.mark.parametrize("change", [_passed_to_one, _views])
def test_what_changes_no_order_of_additions_does_not_change_it(
    change: Callable[[Any], None],
) -> None:
    model = _model()
    before = _print(model)
    change(model)
    assert _print(model) == before


def test_threads_change_it() -> None:
    before, threads = _print(_model()), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert _print(_model()) != before
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("inside", [True, False])
def test_the_probe_sees_reentrant_checkpoints(inside: bool) -> None:
    model = _model()
    probe = ForwardProbe(model)
    called: nn.Module = model
    if inside:
        _checkpointed(model)
    else:
        first, middle, last = model
        called = nn.Sequential(first, _Called(middle), last)
    with probe.watching():
        called(torch.ones(2, 4)).sum().backward()
    assert probe.recomputed == {"1"}
    probe.forget()
    assert probe.recomputed == set()


class _Called(nn.Module):
    """A module that is checkpointed from outside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=True)
        return y
