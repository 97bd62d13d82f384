"""Order of the calls of the units of ZeRO-3, of units with tensors or without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

U = TypeVar("U")


class CallOrder(Generic[U]):
    """Calls of units in one forward, numbered from 0; units of a few next calls are prefetched."""

    def __init__(self, prefetch: int) -> None:
        self.prefetch = prefetch
        self.calls: list[U] = []
        self._expected: list[U] = []  # the calls of the forward before
        self._open: list[int] = []  # numbers of the calls whose backward is not over

    def start(self) -> None:
        """Begin a forward, which is expected to repeat the last one."""
        self._expected, self.calls, self._open = self.calls, [], []

    def enter(self, unit: U) -> list[U]:
        """Record a call; return the units of the calls expected next."""
        self._open.append(len(self.calls))
        self.calls.append(unit)
        return self.ahead()

    def ahead(self) -> list[U]:
        """Return the units of the calls expected after the last one, as in the last forward."""
        number = len(self.calls) - 1
        if self._expected[number : number + 1] != self.calls[number:]:
            return []
        return self._expected[number + 1 : number + 1 + self.prefetch]

    def is_open(self, number: int) -> bool:
        """Return True if neither call `number` nor one before it was reached in the backward."""
        return bool(self._open) and number <= self._open[-1]

    def behind(self, number: int) -> list[U]:
        """Return the units whose backward is next: that of call `number`, and of calls before."""
        return self.calls[max(0, number - self.prefetch) : number + 1][::-1]

    def close(self, number: int) -> Iterator[tuple[U, bool]]:
        """Close the calls after `number`, last first; iterate over (unit, its backward is over)."""
        while self._open and self._open[-1] > number:
            last = self._open.pop()
            unit = self.calls[last]
            yield unit, last == self.calls.index(unit)
