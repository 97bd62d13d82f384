"""Names of the unwrapped model, whatever wraps its modules."""

from __future__ import annotations

import torch
from torch import nn

from zerocheck.contract.names import named_buffers, named_parameters, register


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(2, 3)
        self.head.weight = self.inside[0].weight  # type: ignore[assignment]


class Odd(nn.Module):
    """A wrapper whose prefix no list knows."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.what_is_inside = wrapped


def test_parameters_and_buffers_are_known_by_their_modules() -> None:
    model = Tied()
    wanted = [name for name, _ in model.named_parameters()]
    buffers = [name for name, _ in model.named_buffers()]
    register(model)
    model.inside = Odd(model.inside)  # type: ignore[assignment]
    wrapped = Odd(torch.compile(model))  # type: ignore[arg-type]
    found = dict(named_parameters(wrapped))
    assert sorted(found) == sorted(wanted)
    assert found["inside.0.weight"] is model.head.weight
    assert [name for name, _ in named_buffers(wrapped)] == buffers


def test_unknown_modules_go_by_their_prefixes() -> None:
    wrapped = nn.DataParallel(nn.Linear(2, 3))
    assert [name for name, _ in named_parameters(wrapped)] == ["weight", "bias"]


def test_a_function_of_the_users_own_comes_first() -> None:
    model = nn.Linear(2, 3)
    register(model)
    found = [name for name, _ in named_parameters(model, lambda name: f"mine.{name}")]
    assert found == ["mine.weight", "mine.bias"]
