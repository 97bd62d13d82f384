"""What `attach` costs a training script: on steps that are not checked, and on those that are."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from benchmarks.measuring import Show, table
from torch import nn

import zerocheck

ROUNDS = 40
STEPS = 25
"""Steps of each kind in a round; the kinds take turns."""


def test_cost_of_attach(show: Show, tmp_path: Path) -> None:
    """The same steps without a check, with one that is not due, and with one that is."""
    rows = []
    for width in (32, 256, 1024):
        model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        optimizer = torch.optim.AdamW(model.parameters())
        data = torch.randn(16, width)
        idle = zerocheck.attach(model, optimizer, steps=(), every=None, directory=tmp_path)

        def steps(around: Callable[[], object], count: int = STEPS) -> float:
            started = time.perf_counter()
            for _ in range(count):
                with around():  # type: ignore[attr-defined]  # noqa: B023
                    model(data).square().mean().backward()  # noqa: B023
                    optimizer.step()  # noqa: B023
                    optimizer.zero_grad()  # noqa: B023
            return (time.perf_counter() - started) / count

        steps(nullcontext)
        bare, with_idle = [], []
        for _ in range(ROUNDS):
            bare.append(steps(nullcontext))
            with_idle.append(steps(idle.step))
        due = zerocheck.attach(model, optimizer, steps=(), every=1, directory=tmp_path, quiet=True)
        checked = [steps(due.step, 1) for _ in range(5)]
        pairs = zip(bare, with_idle, strict=True)
        more = statistics.median(b / a - 1 for a, b in pairs)
        low = statistics.median(bare)
        started = time.perf_counter()
        for _ in range(100_000):
            with idle.step():
                pass
        alone = (time.perf_counter() - started) / 100_000
        own = statistics.median(checked)
        parameters = sum(p.numel() for p in model.parameters())
        rows.append([f"{parameters:,}", low * 1e3, f"{more:+.2%}", alone * 1e9, own / low])
        assert alone < 0.01 * low
    columns = ["parameters", "bare step, ms", "not checked", "block alone, ns", "checked / bare"]
    title = "attach in one process; median of rounds that take turns"
    show(table(title, columns, rows))
