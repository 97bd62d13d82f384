"""Watch for implementations that crash alike in every case, such as a config that cannot start.

A few cases then say as much as all of them: the others are left out, and the case is not shrunk.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator

from ...case.reductions import left, simpler
from ...case.schema import Case
from ...protocol.verdicts import Obligation
from ..execute.rank_pool import RankPool
from ..execute.trial import Trial
from ..records.records import CaseFinished
from .bug import Bug, Shrunk
from .extent import extent, groups, size

ALIKE = 3
"""Cases of an implementation that crash alike, before any is judged, until it is looked at."""

CANDIDATES = 5
"""Simple cases that are tried for one that the implementation supports."""


def crash_alike(first: CaseFinished, other: CaseFinished) -> bool:
    """Return True if two cases crash with one type of error at one line.

    Where no code of the user's is on the stack, by the title.
    """
    return (first.status, first.error, first.place or first.title) == (
        "crashed",
        other.error,
        other.place or other.title,
    ) and other.status == "crashed"


class CrashWatch:
    """Counts crashes of each implementation until a case of it ends in any other way."""

    def __init__(self) -> None:
        self._first: dict[str, CaseFinished | None] = {}
        self._counts: Counter[str] = Counter()

    def add(self, finished: CaseFinished) -> bool:
        """Take one case; return True for the one that makes ALIKE of an implementation."""
        name = finished.implementation
        if finished.status == "unsupported":
            return False
        first = self._first.setdefault(name, finished)
        if first is None or finished.known or not crash_alike(first, finished):
            self._first[name] = None
            return False
        self._counts[name] += 1
        return self._counts[name] == ALIKE


def simplest_crash(
    bug: Bug, ranks: RankPool, obligations: Collection[Obligation], fixed: Collection[str]
) -> Shrunk | None:
    """Run the simplest case that the implementation supports; None unless it crashes as the bug.

    So a crash that needs a feature, which the first cases have by chance, stops no run. fixed:
    paths of fields that the implementation fixes.
    """
    started, tries = time.monotonic(), 0
    name = bug.implementation
    for case in _simplest(bug.first.case, fixed):
        tries += 1
        trial = Trial(ranks, name, case, fresh=True, trace=True, obligations=obligations)
        finished = trial.outcome().record(bug.first.number, name, case)
        if finished.status == "unsupported":
            continue
        if not crash_alike(bug.first, finished):
            return None
        needed = left(case, kept=fixed)
        return Shrunk(
            finished=finished,
            violation=None,
            size=size(case),
            extent=extent(case, needed, None),
            groups=groups(case, needed),
            tries=tries,
            spent=tries,
            seconds=time.monotonic() - started,
        )
    return None


def _simplest(case: Case, fixed: Collection[str]) -> Iterator[Case]:
    """Iterate over cases, the simplest first; the case itself if it is the simplest."""
    search = simpler(case, kept=fixed)
    candidates = [candidate for _, candidate in zip(range(CANDIDATES), search, strict=False)]
    yield from candidates or [case]
