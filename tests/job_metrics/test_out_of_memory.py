"""Where a rank ran out of memory, found in the traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerocheck
from zerocheck.job_metrics.out_of_memory import is_out_of_memory, place_of
from zerocheck.job_metrics.records import JobRecord, OutOfMemory

TOO_MUCH = 1 << 50
"""Elements that no machine has memory for."""


def fills() -> None:
    torch.empty(TOO_MUCH)


class _FillsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        fills()
        return gradient


class Filling(nn.Module):
    """Runs out of memory in its second call, in this phase."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.layer, self.phase, self.calls = nn.Linear(4, 4), phase, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.phase == "forward" or (self.phase == "recomputed" and self.calls > 1):
            fills()
        x = self.layer(x)
        return _FillsBackward.apply(x) if self.phase == "backward" else x  # type: ignore[no-any-return,no-untyped-call]


class _FillingAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        fills()


def raised(phase: str) -> tuple[BaseException, nn.Module]:
    model = nn.Sequential(nn.Linear(4, 4), Filling(phase))
    optimizer = _FillingAdamW(model.parameters())
    try:
        x = model[0](torch.ones(2, 4))
        again = phase == "recomputed"
        y = checkpoint(model[1], x, use_reentrant=False) if again else model(torch.ones(2, 4))
        y.sum().backward()
        if phase == "optimizer":
            optimizer.step()
        fills()
    except RuntimeError as error:
        return error, model
    raise AssertionError


@pytest.mark.parametrize(
    ("phase", "expected", "module"),
    [
        ("forward", "forward", "1"),
        ("backward", "backward", ""),
        ("recomputed", "backward", "1"),
        ("optimizer", "optimizer", ""),
        ("", "elsewhere", ""),
    ],
)
def test_the_phase(phase: str, expected: str, module: str) -> None:
    error, model = raised(phase)
    found = place_of(error, model)
    assert (found.phase, found.module) == (expected, module)
    assert found.place.startswith(f"{__file__}:")
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("shape mismatch"), False),
        (KeyError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_which_errors(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


SCRIPT = """
import sys, torch, zerocheck
from torch import nn
model = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
check = zerocheck.attach(model, optimizer, metrics=sys.argv[1])
for step in range(9):
    check.before()
    model(torch.ones(2, 4)).sum().backward()
    if step == 4:
        torch.empty(1 << 50)
    optimizer.step()
    check.after()
"""


def test_an_error_that_ends_the_process(tmp_path: Path) -> None:
    """Without a `with`, and in a step whose collectives are timed: it is recorded, and raised."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "out")], capture_output=True, text=True
    )
    assert done.returncode == 1 and "RuntimeError" in done.stderr
    place = f"{script}:11"
    assert f"zerocheck: rank 0 ran out of memory in step 5, at {place}" in done.stderr
    lines = (tmp_path / "out" / "metrics.jsonl").read_bytes().splitlines()
    found = msgspec.json.decode(lines[-1], type=JobRecord)
    assert isinstance(found, OutOfMemory)
    assert (found.step, found.phase, found.place) == (5, "elsewhere", place)
    assert found.memory.parameters == 80 and found.memory.states == 160 + 8


def test_an_error_that_the_script_catches_is_recorded_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Filling("forward"))
    check = zerocheck.attach(model, torch.optim.AdamW(model.parameters()), metrics=tmp_path)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="allocate"), check.step():
            model(torch.ones(2, 4))
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line)["kind"] for line in lines] == ["out of memory"] * 2
    assert check.summary.count("ran out of memory in step") == 2
    assert "in the forward in 1, at " in check.summary
