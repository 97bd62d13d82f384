"""Parameters that a script casts, that a forward changes, and that change after the update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from three_steps import trained
from torch import nn

import zerocheck


class Model(nn.Module):
    """With a buffer."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, max_norm=max_norm)
        self.inner = nn.Linear(32, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(self.embed(ids).flatten(1))))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def in_bf16() -> nn.Module:
    return make_model().to(torch.bfloat16)


def with_max_norm() -> nn.Module:
    torch.manual_seed(0)
    return Model(max_norm=1.0)


def loss(model: Any) -> torch.Tensor:
    outputs = model(torch.randint(20, (16, 4)))
    return nn.functional.cross_entropy(outputs.float(), torch.randint(4, (16,)))


CASTS = [(in_bf16, make_model), (make_model, in_bf16), (in_bf16, in_bf16)]


@pytest.mark.parametrize(("factor", "status"), [(1.0, "holds"), (3.0, "violated")])
@pytest.mark.parametrize(("make", "reference"), CASTS)
def test_the_reference_computes_in_the_dtypes_of_the_run(
    make: Callable[[], nn.Module],
    reference: Callable[[], nn.Module],
    factor: float,
    status: str,
    tmp_path: Path,
) -> None:
    last = trained(make(), loss, reference, tmp_path, factor=factor)
    assert last.statuses["gradient"] == status, last


def test_rows_that_a_forward_renormalizes_are_no_update(tmp_path: Path) -> None:
    last = trained(with_max_norm(), loss, with_max_norm, tmp_path)
    assert last.statuses["gradient"] == last.statuses["update"] == "holds", last


def shrunk(model: Any) -> None:
    model.embed.weight.mul_(0.99)


@pytest.mark.parametrize("make", [make_model, with_max_norm])
def test_what_changes_after_the_update_is_named(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    last = trained(make(), loss, make, tmp_path, after=shrunk)
    (found,) = [one for one in last.violations if one.obligation == "update"]
    assert "embed.weight was changed in place after optimizer.step()" in found.attribution


def test_a_wrong_update_is_not_said_to_be_a_later_change(tmp_path: Path) -> None:
    def half_rate(model: nn.Module) -> torch.optim.Optimizer:
        class Late(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:
                before = [one.detach().clone() for one in model.parameters()]
                super().step(closure)
                with torch.no_grad():
                    for one, was in zip(model.parameters(), before, strict=True):
                        one.lerp_(was, 0.37)

        return Late(model.parameters(), lr=1e-2)

    model = make_model()
    optimizer = half_rate(model)
    check = zerocheck.attach(model, optimizer, directory=tmp_path, on_violation="warn", every=1)
    with check.step():
        model(torch.randint(20, (16, 4))).sum().backward()
        optimizer.step()
    assert check.last is not None
    (found,) = check.last.violations
    assert found.obligation == "update" and "after optimizer.step()" not in found.attribution
