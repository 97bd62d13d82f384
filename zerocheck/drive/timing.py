"""Times of one rank's steps: start and end of each, and of its collectives.

A separate run, in which nothing is observed and ranks meet before each step, so that the harness's
drawing of samples is not counted. One dispatch mode records collectives, also those called by C++.
It costs each operator some microseconds: the figures include that.

Where the caller waits is not visible from Python if the wait is in C++, as that of DDP's reducer. A
rank therefore counts as waiting for a collective

- within the collective's own operator, and
- from the end of its last operator until the collective is over, if it is within no operator then.

The second is too long by the caller's time between two operators before it begins to wait. A
collective is over when Python learns that its Work is complete.

All of that is host time. On the CPU a backend's threads move the data, on the very cores that the
ranks compute on, so a collective that nobody waits for is hidden, and not free. Communication of an
accelerator is not visible to the host's clock: such collectives are counted, and their times are
left out (`begun`, and nothing after it).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..case.measurement import settled
from ..case.schema import Case
from ..compat import Operators, when_over
from ..contract.implementation import Implementation, Moment
from ..protocol.measurements import CollectiveTimes, StepTimes, Timed
from .collective_trace import call_of
from .collectives import is_collective, name_of

COUNTED = 3
"""Steps that count."""
WARM_UP = 2
"""Steps that do not, with the first one that ends with all that training ever holds: DDP makes its
buckets again in the one after it."""

BOOT = Path("/proc/sys/kernel/random/boot_id")


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
        self._trace = _Trace()
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
        if self._index in self._counted:
            self._steps.append(
                StepTimes(self._began, ended, self._forward, self._reduced, copied, calls)
            )

    def result(self) -> Timed:
        """Return all times."""
        there = _on_accelerator()
        return Timed(
            steps=tuple(self._steps),
            clock=BOOT.read_text(encoding="ascii").strip() if BOOT.exists() else "",
            options=self._options,
            allocated=torch.accelerator.max_memory_allocated() if there else None,
            reserved=torch.accelerator.max_memory_reserved() if there else None,
        )


def _on_accelerator() -> bool:
    """Return True if there is an accelerator, and this rank has memory on it."""
    return torch.accelerator.is_available() and torch.accelerator.memory_reserved() > 0


@dataclass
class _CollectiveInFlight:
    """Collective in flight, as CollectiveTimes."""

    kind: str
    bytes: int
    ranks: int
    root: int
    begun: int
    returned: int = 0
    stalled: int = 0
    over: int = 0


class _Trace(Operators):
    """Trace of the collectives between `start` and `stop`."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_CollectiveInFlight] = []
        self._results: dict[int, _CollectiveInFlight] = {}
        self._on = False
        self._inside = False
        self._left = 0
        self._copied = 0

    def start(self) -> None:
        self._calls, self._results, self._copied = [], {}, 0
        self._left = time.monotonic_ns()
        self._on = True

    def stop(self, now: int) -> tuple[tuple[CollectiveTimes, ...], int]:
        """Return the collectives, and the ns in copies between devices.

        A collective in flight has hidden time until now.
        """
        self._on = False
        for one in self._calls:
            if not one.over and one.returned:
                one.stalled = one.over = now
        return tuple(CollectiveTimes(*astuple(one)) for one in self._calls), self._copied

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self._on:
            return func(*args, **kwargs)
        collective = is_collective(func)
        one = self._call_record(func, args, kwargs) if collective else None
        began = time.monotonic_ns()
        self._inside = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._left = now = time.monotonic_ns()
            self._inside = False
        if one is not None:
            one.begun = began
            self._begun(one, result, now)
        elif _copies(func, args, result):
            self._copied += now - began
        elif name_of(func) == "wait_tensor":
            waited = self._results.pop(args[0].data_ptr(), None)
            if waited is not None:
                waited.stalled, waited.over = began, now
        return result

    def _call_record(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _CollectiveInFlight:
        call = call_of(func, args, kwargs, 0, "step")
        names = [argument.name for argument in func._schema.arguments]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        root = named.get("root_rank", named.get("src", -1))
        return _CollectiveInFlight(call.kind, call.bytes, call.ranks, int(root), 0)

    def _begun(self, one: _CollectiveInFlight, result: Any, now: int) -> None:
        """Watch for the end of a collective whose operator has returned."""
        self._calls.append(one)
        tensors = [part for part in _flat(result) if isinstance(part, torch.Tensor)]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return
        one.returned = now
        works = [part for part in _flat(result) if not isinstance(part, torch.Tensor)]
        if not works:  # of a functional operator, which gives tensors to wait for
            self._results.update((tensor.data_ptr(), one) for tensor in tensors)
            return
        try:
            when_over(works[0], lambda: self._over(one))
        except RuntimeError:  # messages between two ranks: waiting for them is not seen
            one.stalled = one.over = now

    def _over(self, one: _CollectiveInFlight) -> None:
        one.over = now = time.monotonic_ns()
        one.stalled = now if self._inside else max(self._left, one.returned)
        if not self._inside:
            self._left = now


def _copies(func: Any, args: Sequence[Any], result: Any) -> bool:
    """Return True for an operator that copies a tensor from one device to another."""
    if func._schema.name == "aten::copy_":
        return bool(args[0].device != args[1].device)
    if func._schema.name == "aten::_to_copy":
        return bool(args[0].device != result.device)
    return False


def _flat(given: Any) -> list[Any]:
    if isinstance(given, list | tuple):
        return [one for part in given for one in _flat(part)]
    return [given]
