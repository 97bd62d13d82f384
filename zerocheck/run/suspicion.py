"""Failures that no fresh rank processes show: possible causes, and whether they count."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ..judge.verdict import Obligation
from ..ranks.result import JobResult
from .confirmation import shows
from .findings import Bug
from .outcome import Outcome
from .records import CaseFinished
from .trial import RankPool, Trial

RACE = "a race, or memory that is read before it is written"


@dataclass
class LastOnRanks:
    """The case that each team of rank processes ran last, by the number of the team."""

    _cases: dict[int, CaseFinished] = field(default_factory=dict)

    def before(self, results: Sequence[JobResult]) -> CaseFinished | None:
        """Return the previous case of the ranks that just ended one; None where they were fresh."""
        return self._cases.get(results[-1].team)

    def ran(self, results: Sequence[JobResult], finished: CaseFinished) -> None:
        """Note a case."""
        for result in results:
            self._cases[result.team] = finished


@dataclass(frozen=True)
class Suspicion:
    """Reason why a failure showed in its run alone. counts: it fails the run all the same."""

    words: str
    counts: bool


def suspect(
    bug: Bug,
    before: CaseFinished | None,
    ranks: RankPool,
    obligations: Collection[Obligation],
) -> Suspicion:
    """Run the case before that of the bug, then its own, on the same fresh rank processes.

    Called for a bug that fresh rank processes never show. If it shows now, the case before leaves a
    state behind that changes the next one. If that was another implementation's, this one is not to
    blame. Ranks that were there are not used again. A second case of the bug, in other processes,
    counts.
    """
    ranks.renew()
    if before is None:
        return Suspicion(RACE, counts=bug.cases > 1)
    named = f"case {before.number} ({before.implementation})"
    if _shows_after(bug, before, ranks, obligations):
        words = f"it shows only after {named} in the same processes, which leaves a state behind"
        return Suspicion(words, counts=before.implementation == bug.implementation)
    words = f"{RACE}; {named} ran before it in the same processes, but does not bring it"
    return Suspicion(words, counts=bug.cases > 1)


def _shows_after(
    bug: Bug, before: CaseFinished, ranks: RankPool, obligations: Collection[Obligation]
) -> bool:
    def outcome(case: CaseFinished) -> Outcome:
        return Trial(ranks, case.implementation, case.case, obligations=obligations).outcome()

    outcome(before)
    return shows(bug, outcome(bug.first))
