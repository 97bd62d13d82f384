"""Failures that no fresh rank processes show: possible causes, and whether they count."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from ...protocol.verdicts import Obligation
from ...ranks.result import JobResult
from ..execute.rank_pool import RankPool
from ..execute.trial import Trial
from ..records.records import CaseFinished, Outcome
from ..records.tally import FAILING, status_of_case
from .bug import Bug
from .confirmation import confirm, shows
from .findings import Findings

RACE = "a race, or memory that is read before it is written"


@dataclass
class Confirmer:
    """Confirms the bugs of a case in fresh rank processes, before the case is recorded.

    Where they show nothing, the case is recorded as they judge it.
    """

    findings: Findings
    ranks: RankPool
    obligations: Collection[Obligation]
    _last: dict[int, CaseFinished] = field(default_factory=dict)
    """Last case of each team of rank processes, by the number of the team."""

    def confirm(
        self,
        finished: CaseFinished,
        bugs: Sequence[Bug],
        results: Sequence[JobResult],
        record: Callable[[Outcome], CaseFinished],
    ) -> CaseFinished:
        """Count how often each bug shows again; return the case as it is to be recorded.

        bugs: those that `Findings.add` returned for the case; results: of its jobs, none if
        another run took it; record: makes a record of another outcome of the case.
        """
        before = self._last.get(results[-1].team) if results else None
        self._last.update((result.team, finished) for result in results)
        shown = [bug for bug in self.findings.of_last if bug.issue is None]
        bugs = [bug for bug in bugs if bug.issue is None]
        doubtful = [bug for bug in bugs if bug.cases == 1 or bug.suspicion]
        again = None
        for bug in bugs:
            again = confirm(bug, self.ranks, self.obligations)
            bug.suspicion = ""
        if again is None or any(bug.confirmed or bug not in doubtful for bug in shown):
            return finished
        judged = record(again)
        if status_of_case(judged) in FAILING:
            return finished
        suspicions = [suspect(bug, before, self.ranks, self.obligations) for bug in bugs]
        for bug, suspicion in zip(bugs, suspicions, strict=True):
            bug.extent = suspicion.words
            bug.suspicion = "" if suspicion.counts else suspicion.words
        if any(suspicion.counts for suspicion in suspicions):
            return finished
        return replace(judged, unreproduced="; ".join(bug.title for bug in bugs))


@dataclass(frozen=True)
class Suspicion:
    """Reason why a failure showed in its run alone. counts: it fails the run all the same."""

    words: str
    counts: bool


def suspect(
    bug: Bug, before: CaseFinished | None, ranks: RankPool, obligations: Collection[Obligation]
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
