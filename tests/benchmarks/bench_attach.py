"""What `attach` costs a training script: on steps that are not checked, checked, and recorded."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from benchmarks.measuring import Show, table
from torch import nn

import zerocheck

ROUNDS = 30
STEPS = 10
"""Steps of each kind in a round; the kinds take turns."""
BLOCKS = 100_000
"""Empty blocks, to time one."""

Around = Callable[[], AbstractContextManager[None]]


class Script:
    """A training script of two linear layers."""

    def __init__(self, width: int) -> None:
        self.model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.data = torch.randn(16, width)

    def seconds(self, around: Around, count: int = STEPS) -> float:
        """Per step."""
        started = time.perf_counter()
        for _ in range(count):
            with around():
                self.model(self.data).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
        return (time.perf_counter() - started) / count


def test_cost_of_attach(show: Show, tmp_path: Path) -> None:
    """The same steps without a check, with one that is not due, and with one that is."""
    rows = []
    for width in (32, 128, 512):
        script = Script(width)
        parts = script.model, script.optimizer
        idle = zerocheck.attach(*parts, steps=(), every=None, directory=tmp_path)
        due = zerocheck.attach(*parts, steps=(), every=1, directory=tmp_path)
        kept = zerocheck.attach(*parts, steps=(), every=None, directory=tmp_path, recorder="256MiB")
        script.seconds(nullcontext)
        pairs = [(script.seconds(nullcontext), script.seconds(idle.step)) for _ in range(ROUNDS)]
        bare = statistics.median(one for one, _ in pairs)
        more = statistics.median(other / one - 1 for one, other in pairs)
        checked = statistics.median(script.seconds(due.step, 1) for _ in range(5))
        recorded = statistics.median(script.seconds(kept.step, 1) for _ in range(5))
        started = time.perf_counter()
        for _ in range(BLOCKS):
            with idle.step():
                pass
        alone = (time.perf_counter() - started) / BLOCKS
        parameters = sum(parameter.numel() for parameter in script.model.parameters())
        rows.append(
            [
                f"{parameters:,}",
                f"{bare * 1e3:.3f}",
                f"{more:+.2%}",
                f"{alone * 1e9:.0f}",
                f"{alone / bare:.3%}",
                f"{checked / bare:.0f}",
                f"{recorded / bare:.0f}",
            ]
        )
        assert alone < 0.01 * bare
    names = (
        "parameters",
        "bare, ms",
        "not checked",
        "block, ns",
        "block / bare",
        "checked / bare",
        "recorded / bare",
    )
    show(table(f"attach in one process; medians of {ROUNDS} rounds, in turns", names, rows))
