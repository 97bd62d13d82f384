"""A step with a value that is not finite: the first one is named, and nothing of it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from asking import Ask, held
from torch import nn

import zerocheck
from zerocheck.attached.session import Attached


class Bad(nn.Module):
    """Passes its input on, changed in one call by `change`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.at, self.change = 0, -1, lambda x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.change(x) if self.calls == self.at else x


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), Bad(), nn.Tanh(), nn.Linear(7, 2))


def element(x: torch.Tensor, value: float) -> torch.Tensor:
    """Put a value into [1, 2]."""
    mask = torch.zeros_like(x)
    mask[1, 2] = value
    return x + mask


def train(
    directory: Path,
    change: Any = None,
    *,
    count: int = 3,
    loss: Any = lambda out, call: out.square().mean(),
    optimizer: Any = torch.optim.AdamW,
    skips: bool = False,
    referenced: bool = False,
    after: Any = lambda model: None,
) -> Attached:
    """Two microbatches a step; the change is in the second of step 2."""
    model = net()
    if change is not None:
        model[1].at, model[1].change = 4, change
    updates = optimizer(model.parameters(), lr=1e-2)
    check = zerocheck.attach(
        model,
        updates,
        directory=directory / "kept",
        on_violation="warn",
        reference=net if referenced else None,
    )
    call = 0
    for _ in range(count):
        with check.step():
            for _ in range(2):
                call += 1
                loss(model(torch.randn(4, 5)), call).backward()
            after(model)
            gradients = [one.grad for one in model.parameters()]
            if not skips or all(bool(one.isfinite().all()) for one in gradients):
                updates.step()
            model.zero_grad()
        if check.wrong:
            break
    return check


def said(check: Attached) -> str:
    assert check.last is not None and check.wrong == 1, check.summary
    first = check.last.violations[0]
    assert first.causes == ("step not skipped",) and first.obligation == "update"
    assert check.last.statuses["update"] == "violated"
    begin, _, rest = first.explanation.partition(": ")
    assert begin == "the step was taken with a value that is not finite, no rank skipped it"
    return rest.removeprefix("the first value that is not finite is ")


@pytest.mark.parametrize("referenced", [False, True])
def test_the_output_of_a_module(tmp_path: Path, referenced: bool) -> None:
    check = train(tmp_path, lambda x: element(x, torch.nan), referenced=referenced)
    where = "NaN in the output of 1 (Bad), element [1, 2], in microbatch 1 on rank 0"
    assert said(check) == where
    assert check.last is not None and check.last.statuses["gradient"] != "holds"


def test_infinity_that_becomes_nan(tmp_path: Path) -> None:
    """The first NaN is named; an infinity before it may be meant."""
    check = train(tmp_path, lambda x: element(x, torch.inf) * 0.0)
    assert said(check).startswith("NaN in the output of 1 (Bad)")


def test_an_infinity_without_nan(tmp_path: Path) -> None:
    def loss(out: torch.Tensor, call: int) -> torch.Tensor:
        return out.sum() * (torch.inf if call == 4 else 1.0)

    where = said(train(tmp_path, loss=loss, referenced=True))
    assert where.startswith("inf in the gradient of the loss by output 0 of the model")
    assert where.endswith("in microbatch 1 on rank 0")


def test_the_loss(tmp_path: Path) -> None:
    """Without a reference the first gradient is named."""

    def loss(out: torch.Tensor, call: int) -> torch.Tensor:
        return (out - out.detach() - 1.0).sum().sqrt() if call == 4 else out.sum()

    where = said(train(tmp_path, loss=loss))
    assert where == "NaN in gradient of 0.weight, element [0, 0] on rank 0"


def test_the_input(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    check = zerocheck.attach(model, optimizer, directory=tmp_path, on_violation="warn")
    with check.step():
        model(element(torch.randn(4, 5), torch.nan)).sum().backward()
        optimizer.step()
    assert said(check).startswith("NaN in input [0][0] of the model, element [1, 2], in microbatch")


def test_the_state_before(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model[3].bias[1] = torch.nan
    check = zerocheck.attach(model, optimizer, directory=tmp_path, on_violation="warn")
    with check.step():
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
    assert check.wrong == 0  # its gradient is finite, and nothing comes to the others
    with check.step():
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    assert said(check) == "NaN in parameter of 3.bias as the step began, element [1] on rank 0"


def test_the_update(tmp_path: Path) -> None:
    """A finite gradient can overflow in a state."""
    check = train(tmp_path, lambda x: x * 1e20, loss=lambda out, call: out.sum() * 1e20)
    assert "exp_avg_sq of" in said(check) and "after the step" in said(check)


def test_what_all_ranks_skip_is_right(tmp_path: Path) -> None:
    check = train(tmp_path, lambda x: element(x, torch.nan), skips=True)
    assert not check.wrong and check.last is not None, check.summary
    assert check.summary.startswith("zerocheck: 3 of 3 steps checked, all hold")


def test_nan_that_comes_to_no_gradient(tmp_path: Path) -> None:
    """As where a mask leaves it out."""

    def change(x: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.ones_like(x, dtype=torch.bool), x, x.detach() * torch.nan)

    assert not train(tmp_path, change).wrong

    def repaired(model: nn.Module) -> None:
        for one in model.parameters():
            torch.nan_to_num_(one.grad)

    assert not train(tmp_path, lambda x: element(x, torch.nan), after=repaired).wrong


def test_hooks_go_away_and_compiled_modules_get_none(tmp_path: Path) -> None:
    model = net()
    model[0].compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    check = zerocheck.attach(model, optimizer, directory=tmp_path)
    with check.step():
        counts = [len(one._forward_hooks) for one in model.modules()]
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
    assert counts == [1, 0, 1, 1, 1]
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "fsdp1"])
def test_on_ranks(ask: Ask, wrap: str) -> None:
    """On rank 1 alone, in the second step; the steps after it are lost as well."""
    for answer in ask("not_finite", wrap=wrap):
        first, second, third = answer["steps"]
        assert {"update", "gradient"} <= held(first)
        for step in (second, third):
            assert step["violations"][0]["causes"] == ["step not skipped"], step
            assert step["statuses"]["gradient"] != "holds", step
        assert "NaN in the output of 2 (Tanh)" in answer["summary"], answer["summary"]
        assert "in microbatch 0 on rank 1" in answer["summary"]


def test_ranks_that_do_not_agree_to_skip(ask: Ask) -> None:
    for answer in ask("not_finite", wrap="plain_alike", one_skips=True):
        second = answer["steps"][1]
        assert second["violations"][0]["causes"] == ["ranks disagree"], second
        assert "only some ranks took a step" in answer["summary"]
        assert "is NaN in the output of 2 (Tanh)" in answer["summary"]


def test_a_scaler_that_skips_says_what_it_skipped(ask: Ask) -> None:
    for answer in ask("scaled", overflows=True):
        assert "all ranks skipped the step" in answer["steps"][1]["unjudged"]["gradient"]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_nan_of_a_job_is_no_memory_that_was_never_written(ask: Ask, wrap: str) -> None:
    """Nothing fills the memory of a job; local gradients are finite, so the gradient is wrong."""
    for answer in ask("referenced", wrap=wrap, fault="not finite"):
        violations = {one["obligation"]: one for one in answer["violations"]}
        assert violations["update"]["causes"] == ["step not skipped"], answer
        assert violations["gradient"]["causes"] == [], answer
        assert "never written" not in answer["summary"]
        assert violations["gradient"]["tensors"][0] == "0.weight", answer
