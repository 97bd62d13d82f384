"""Streams of drawn cases that continue until enough of them can be run.

Code that is made for little (one dtype, one way to clip) would be tried on a handful of cases
otherwise. Its refusals are known in advance from `supports`; else a case is refused while it is
built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...case.schema import Case
from ...errors import UsageError

Asking = Callable[[Sequence[Case]], list[str | None]]
"""asking(cases) -> of each case, why it is not supported, or None."""

MOST_DRAWN = 16
"""How many times as many cases are drawn, at most."""

MOST_GIVEN = 4
"""How many times as many cases are given, at most, where most are refused while they are built."""


class Stream:
    """Cases of a seed for one implementation, and more of them where most are refused.

    cases: those to begin with.
    """

    def __init__(self, draw_some: Callable[[int], list[Case]], count: int, ask: Asking) -> None:
        """Draw the first cases.

        draw_some(n): at most n cases, of which more begin with the same ones, as a rule; count:
        the number of cases wanted.
        """
        self._draw = draw_some
        self._count = count
        self._ask = ask
        self._times = 1
        self.cases = self._first()
        self._given = dict.fromkeys(self.cases)
        self._refused: set[Case] = set()
        self._ahead: list[Case] = []

    def _first(self) -> list[Case]:
        """Return `draw_some(count)`, if at least half of these are supported.

        Else more are drawn, and all that are supported stay, up to `count`; of those that are not,
        one for each reason, up to a quarter, so that reports have the reasons.
        """
        cases = self._draw(self._count)
        if 2 * self._ask(cases).count(None) >= len(cases):
            return cases
        kept = cases
        while (more := self._further(len(cases))) is not None:
            cases, kept = more, _worth(more, self._ask(more), self._count)
            if len(kept) == self._count:
                break
        return kept

    def _further(self, than: int) -> list[Case] | None:
        """Draw four times as many as the last time; None if there are no more."""
        if self._times >= MOST_DRAWN:
            return None
        self._times *= 4
        try:
            cases = self._draw(self._count * self._times)
        except UsageError:  # the fixed fields leave no more
            return None
        return cases if len(cases) > than else None

    def note(self, case: Case) -> None:
        """Note a case that was refused while it was built."""
        if case in self._given:
            self._refused.add(case)

    def more(self) -> list[Case]:
        """Return further cases, while less than half of those wanted could be built."""
        able = len(self._given) - len(self._refused)
        left = MOST_GIVEN * self._count - len(self._given)
        if not self._refused or 2 * able >= self._count or left <= 0:
            return []
        while not self._ahead and (cases := self._further(len(self._given))) is not None:
            fresh = [case for case in cases if case not in self._given]
            reasons = self._ask(fresh)
            self._ahead = [c for c, reason in zip(fresh, reasons, strict=True) if reason is None]
        count = min(left, self._count)
        taken, self._ahead = self._ahead[:count], self._ahead[count:]
        self._given |= dict.fromkeys(taken)
        return taken


def _worth(cases: Sequence[Case], reasons: Sequence[str | None], count: int) -> list[Case]:
    """Return the first `count` cases that can be run, and some of the first refused ones."""
    kept: list[Case] = []
    explained: set[str] = set()
    for case, reason in zip(cases, reasons, strict=True):
        if reason is None:
            kept.append(case)
        elif reason not in explained and len(explained) < max(1, count // 4):
            explained.add(reason)
            kept.append(case)
    return kept[:count]
