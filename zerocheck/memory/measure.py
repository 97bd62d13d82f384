"""Measurement of the same run on tensors with data, by torch's CPU allocator: for small models."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

from .allocation_tracker import MARK
from .setup import Setup
from .simulate import Simulation, simulate
from .source import ModelSource


@dataclass(frozen=True, slots=True)
class AllocatorBytes:
    """Bytes of the allocator, from the beginning of the run on.

    ends: (step, phase) -> bytes held at the end of it; peaks: the most in it.
    """

    run: Simulation
    ends: dict[tuple[int, str], int]
    peaks: dict[tuple[int, str], int]

    @property
    def peak(self) -> int:
        """Largest number of bytes in the steps."""
        return max(self.peaks[key] for key in self.peaks if key[1] != "built")


def measure(setup: Setup, source: ModelSource, blocks: int | None = None) -> AllocatorBytes:
    """Run the setup with the profiler on. Allocations inside of kernels are included."""
    gc.collect()  # else what an earlier run left may be given back in this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run = simulate(setup, source, blocks, data=True)
    tree: Any = profiler.profiler.kineto_results.experimental_event_tree()
    ends: dict[tuple[int, str], int] = {}
    peaks: dict[tuple[int, str], int] = {}
    held, key = 0, (-1, "")
    for event in sorted(_flat(tree), key=lambda one: one.start_time_ns):
        if event.name.startswith(MARK):
            _, phase, step = event.name.split()
            key = int(step), phase
            if phase == "built":
                held = 0  # what was there before is not ours
            peaks[key] = held
        elif event.name == "[memory]":
            held += event.extra_fields.alloc_size
        else:
            continue
        if not key[1] or key[1] == "closed":
            continue
        ends[key] = held
        peaks[key] = max(peaks.get(key, 0), held)
    return AllocatorBytes(run, ends, peaks)


def _flat(events: Any) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _flat(event.children)
