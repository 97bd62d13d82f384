"""Times of the collectives that this rank calls, by a dispatch mode on torch's operators.

It sees collectives called by C++, too, and costs each operator some microseconds: the figures
include that. A compiled model runs uncompiled within it.

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from ..compat import Operators, when_over
from ..drive.collective_trace import call_of
from ..drive.collectives import is_collective, name_of
from .records import CollectiveTimes

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def clock() -> str:
    """Return a name of this host's clock: times of ranks with the same one can be compared."""
    return _BOOT.read_text(encoding="ascii").strip() if _BOOT.exists() else ""


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


class TimedCollectives(Operators):
    """Times of the collectives, and of copies between devices, from `start` to `stop`.

    A call that it cannot time, as of an unknown operator, is left out.
    """

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
        one = None
        with suppress(Exception):  # of the timing, and kept out of the operator
            one = self._call_record(func, args, kwargs) if is_collective(func) else None
        began = time.monotonic_ns()
        self._inside = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._left = now = time.monotonic_ns()
            self._inside = False
        with suppress(Exception):
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
