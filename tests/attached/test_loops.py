"""Steps as people write them: what happens to gradients and weights around the update."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from three_steps import attached, net
from torch import nn

from zerocheck.attached.record.step_record import ACCUMULATED, GIVEN, ShardPiece
from zerocheck.attached.verdict.reduced_gradient import Judged, first_right
from zerocheck.contract.semantics import Semantics
from zerocheck.protocol.observations import Entry


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(4, 5)).square().mean()


class ClipsEach(torch.optim.SGD):
    """Its step clips each gradient by itself."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                nn.utils.clip_grad_norm_(parameter, 1e-3)
        return super().step(closure)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_that_clips_in_its_step(tmp_path: Path, momentum: float) -> None:
    model = net()
    optimizer = ClipsEach(model.parameters(), lr=0.1, momentum=momentum)
    check = attached(model, optimizer, tmp_path, reference=net)
    for _ in range(3):
        with check.step():
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    assert not check.wrong and check.last is not None, check.summary
    assert check.last.statuses["update"] == check.last.statuses["gradient"] == "holds"


class Teaching(nn.Module):
    """A student, and a teacher that is the average of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = net(), net().requires_grad_(False)
        self.inside = False

    @torch.no_grad()
    def average(self) -> None:
        pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for teacher, student in pairs:
            teacher.data = teacher.data * 0.9 + student.data * 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inside:
            self.average()
        return self.student(x) - self.teacher(x).detach()


@pytest.mark.parametrize("where", ["forward", "after the step", "optimizer"])
def test_weights_that_no_optimizer_has(tmp_path: Path, where: str) -> None:
    """The script may average them; the optimizer's step must leave them alone."""
    model = Teaching()
    model.inside = where == "forward"
    optimizer = torch.optim.AdamW(model.student.parameters())
    if where == "optimizer":
        optimizer.register_step_post_hook(lambda *_: model.average())
    check = attached(model, optimizer, tmp_path, reference=Teaching)
    for _ in range(3):
        with check.step():
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            if where == "after the step":
                model.average()
    assert check.last is not None
    if where == "optimizer":
        assert check.wrong and "teacher.0.weight" in check.last.violations[0].tensors
        return
    assert not check.wrong, check.summary
    assert check.last.unjudged["update"] == (
        "the script itself changes every frozen tensor, which no optimizer updates"
    )


@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_that_are_frozen_or_used_after_the_step(tmp_path: Path, frozen: bool) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    check = attached(model, optimizer, tmp_path, reference=net)
    for _ in range(3):
        with check.step():
            optimizer.zero_grad()
            model.requires_grad_(True)
            loss_of(model).backward()
            model.requires_grad_(not frozen)
            optimizer.step()
            if not frozen:
                loss_of(model).backward()
    assert not check.wrong and check.last is not None, check.summary
    assert check.last.statuses["gradient"] == check.last.statuses["update"] == "holds"


@pytest.mark.parametrize("clips", [True, False])
def test_gradients_that_are_cleared_before_the_step(tmp_path: Path, clips: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    check = attached(model, optimizer, tmp_path, reference=net)
    for _ in range(2):
        with check.step():
            loss_of(model).backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.zero_grad()
            optimizer.step()
    assert check.wrong == 2 and check.last is not None
    assert check.last.violations[0].causes == ("gradient missing",)


class LooksAhead(torch.optim.Optimizer):
    """Every second step goes back half of the way, through `.data`, which counts no change."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
        self.slow = [p.detach().clone() for p in inner.param_groups[0]["params"]]
        self.taken = 0

    def step(self, closure: Any = None) -> Any:
        result = self.inner.step(closure)
        self.taken += 1
        if self.taken % 2 == 1:
            for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                parameter.data.copy_(slow.add_(parameter.data - slow, alpha=0.5))
        return result


def test_an_optimizer_around_another_that_changes_data(tmp_path: Path) -> None:
    model = net()
    optimizer = LooksAhead(torch.optim.AdamW(model.parameters(), lr=1e-2))
    check = attached(model, optimizer, tmp_path, reference=net)
    for _ in range(4):
        with check.step():
            optimizer.inner.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    assert not check.wrong and check.last is not None, check.summary
    assert check.last.unjudged["update"].startswith("LooksAhead changes every tensor after")


def test_what_the_optimizer_has_beside_the_model(tmp_path: Path) -> None:
    model, head = net(), nn.Linear(2, 1)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
    check = attached(model, optimizer, tmp_path, reference=net)
    with check.step():
        head(model(torch.randn(4, 5))).sum().backward()
        optimizer.step()
    assert check.last is not None and check.last.unjudged["ownership"] == (
        "2 tensors of the optimizer not in the attached model: copies may differ between ranks"
    )


def test_the_point_with_the_fewest_wrong_tensors() -> None:
    """Where a script reduces itself, all are wrong before, and those that it forgot after it."""
    local = Judged(9.0, {"a": 9.0, "b": 8.0}, (), ())
    found = {ACCUMULATED: [local], GIVEN: [Judged(9.0, {"b": 8.0}, (), ())]}
    pieces = [ShardPiece(Entry(name, (1,), 0, 1), (1,), "float32", 0) for name in "ab"]
    summary: Any = SimpleNamespace(pieces=pieces)
    assert first_right(found, summary, Semantics())[0] == GIVEN  # type: ignore[arg-type]
    found[GIVEN] = [local]
    assert first_right(found, summary, Semantics())[0] == ACCUMULATED  # type: ignore[arg-type]
    summary.pieces = [msgspec.structs.replace(one, left_out=True) for one in pieces]
    assert first_right(found, summary, Semantics())[0] == GIVEN  # type: ignore[arg-type]
