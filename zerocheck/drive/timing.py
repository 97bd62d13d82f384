"""Times of one rank's steps: start and end of each, and of its collectives.

A separate run, in which nothing is observed and ranks meet before each step, so that the harness's
drawing of samples is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..case.measurement import settled
from ..case.schema import Case
from ..contract.implementation import Implementation, Moment
from ..protocol.measurements import StepTimes, Timed
from .timed_collectives import TimedCollectives, clock

COUNTED = 3
"""Steps that count."""
WARM_UP = 2
"""Steps that do not, with the first one that ends with all that training ever holds: DDP makes its
buckets again in the one after it."""


def counted(case: Case) -> tuple[int, ...]:
    """Return the indices of the steps that count: after the warm-up, with an update.

    A step that overflows makes none.
    """
    after = settled(case) + WARM_UP
    return tuple(
        index for index in range(after, after + COUNTED + 1) if index != case.training.overflow
    )[:COUNTED]


class Timing:
    """Timer of one rank's steps, from the case's first to the last that counts."""

    def __init__(self, implementation: type[Implementation], case: Case) -> None:
        self.first = case.training.first
        self._counted = counted(case)
        self.end = self._counted[-1] + 1
        self._options = tuple(implementation.options or ())
        self._trace = TimedCollectives()
        self._steps: list[StepTimes] = []
        self._index = self.first
        self._began = self._forward = self._entered = self._reduced = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the steps taken within the context."""
        with self._trace:
            yield

    def begun(self, index: int) -> None:
        """Start a step, after waiting for all ranks."""
        self._index = index
        self._forward = self._entered = self._reduced = 0
        if index == self._counted[0] and _on_accelerator():
            torch.accelerator.reset_peak_memory_stats()
        dist.barrier()
        self._trace.start()
        self._began = time.monotonic_ns()

    def entered(self) -> None:
        """Note that a forward begins."""
        self._entered = time.monotonic_ns()

    def on_loss(self, loss: torch.Tensor) -> None:
        """Note that a forward is over."""
        self._forward += time.monotonic_ns() - self._entered

    def reached(self, moment: Moment) -> None:
        """Note that gradients are reduced, or clipped."""
        if moment == "reduced":
            self._reduced = time.monotonic_ns()

    def taken(self) -> None:
        """Note that `train_step` has returned."""
        if _on_accelerator():
            torch.accelerator.synchronize()
        ended = time.monotonic_ns()
        calls, copied = self._trace.stop(ended)
        if self._trace.error is not None:
            raise self._trace.error
        if self._index in self._counted:
            self._steps.append(
                StepTimes(self._began, ended, self._forward, self._reduced, copied, calls)
            )

    def result(self) -> Timed:
        """Return all times."""
        there = _on_accelerator()
        return Timed(
            steps=tuple(self._steps),
            clock=clock(),
            options=self._options,
            allocated=torch.accelerator.max_memory_allocated() if there else None,
            reserved=torch.accelerator.max_memory_reserved() if there else None,
        )


def _on_accelerator() -> bool:
    """Return True if there is an accelerator, and this rank has memory on it."""
    return torch.accelerator.is_available() and torch.accelerator.memory_reserved() > 0
