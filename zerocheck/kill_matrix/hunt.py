"""Search for one fault: the cases of a run of the faulty code, until it is caught."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from ..case.schema import Case
from ..causes.registry import find
from ..faults.fault import Fault
from ..protocol.verdicts import MEMORY
from ..run.findings.bug import Bug, Parted
from ..run.findings.findings import Findings
from ..run.findings.parting import better, parted, parts, variants
from ..run.findings.shrink import paths
from ..run.plan.plan import Plan, PlannedCase
from ..run.records.exercised import idle
from ..run.records.matrix_records import FaultTried
from ..run.records.records import Outcome
from ..run.records.tally import FAILING
from .scheduler import Search, TrialRequest

FAILING_CASES = 3
"""Failing cases over which causes are intersected, at least, and of two numbers of ranks. Causes
coincide in a case where two of its numbers are equal, mostly those of ranks and microbatches."""

MORE_CASES = 12
"""Cases after the one that caught it, at most: a fault that needs a rare feature may fail no other
soon."""


@dataclass(frozen=True)
class TrialAnswer:
    """Verdict on a case. judging: seconds that it took."""

    outcome: Outcome
    judging: float = 0.0


class Hunt:
    """Row of the matrix and its search. fault: the one that is hunted; row: the results so far."""

    def __init__(
        self,
        fault: Fault,
        *,
        plan: Callable[[], Plan],
        fixed: Callable[[], Mapping[str, object]],
        done: Callable[[Hunt], None],
    ) -> None:
        """Prepare the search for a fault.

        plan(): the cases; fixed(): fields of cases that the implementation fixes; both are called
        when the search begins. done(hunt): called when it is over.
        """
        self.fault = fault
        self._plan = plan
        self._fixed = fixed
        self._done = done
        self._findings = Findings()
        self._sizes: set[int] = set()
        """Numbers of ranks of failing cases."""
        self.row = FaultTried(
            fault=fault.name,
            where=fault.where,
            parent=fault.parent,
            summary=fault.summary,
            source=fault.source,
            expected=fault.obligation,
            true_causes=fault.causes,
            rubric=rubric(fault),
        )

    @property
    def bug(self) -> Bug | None:
        """First finding, or None as long as the fault is not caught."""
        return self._findings.bugs[0] if self._findings.bugs else None

    def search(self) -> Search[TrialAnswer]:
        """Ask for cases until the row is complete."""
        yield from self._catch()
        self._done(self)

    def _catch(self) -> Search[TrialAnswer]:
        """Ask for cases until enough of them failed.

        A case that the parent fails too says nothing about the fault. The parent is asked at once,
        though it is wanted only if the case fails: mostly it does, and faults of one parent share
        its answers.
        """
        plan = self._plan()
        number = after = 0
        measured = self.fault.obligation in MEMORY
        while number < len(plan.cases) or plan.more():
            item = plan.cases[number]
            number += 1
            answers = yield (
                TrialRequest(item.implementation, item.case, measured=measured),
                TrialRequest(self.fault.parent, item.case, measured=measured),
            )
            outcome, control = (answer.outcome for answer in answers)
            refused = outcome.status == "unsupported"
            if refused or outcome.judgement is not None:
                finished = outcome.record(number - 1, item.implementation, item.case)
                plan.note(item, refused=refused, idle=idle(finished))
            if not self.row.caught:
                self._count(outcome)
            if outcome.status in FAILING:
                if control.status not in FAILING:
                    first = not self.row.caught
                    self._failed(number, item.case, outcome)
                    if first and outcome.judgement is not None:
                        more = answers[0].judging - answers[1].judging
                        self.row = replace(self.row, diagnosis=max(0.0, more))
                    if first and outcome.judgement is None:
                        yield from self._traced(item)
                elif not self.row.caught:
                    self.row = replace(self.row, parents=self.row.parents + 1)
            if self.row.caught:
                broken = self.fault.obligation is None  # it has no cause to be named
                enough = self.row.failing >= FAILING_CASES and len(self._sizes) > 1
                if broken or enough or after == MORE_CASES:
                    break
                after += 1
        if self.row.caught:
            yield from self._parted()

    def _traced(self, item: PlannedCase) -> Search[TrialAnswer]:
        """Find the cause of a crash or hang from the collectives of each rank."""
        (answer,) = yield (TrialRequest(item.implementation, item.case, traced=True),)
        (bug,) = self._findings.bugs
        bug.causes = answer.outcome.causes
        self.row = replace(self.row, causes=bug.causes)

    def _parted(self) -> Search[TrialAnswer]:
        """Tell apart what the numbers of the case cannot, as a run does of each finding."""
        bug = self._findings.bugs[0]
        if not parts(bug):
            return
        found: Parted | None = None
        for variant in variants(bug.first.case, kept=paths(self._fixed())):
            answers = yield (
                TrialRequest(self.fault.where, variant),
                TrialRequest(self.fault.parent, variant),
            )
            outcome, control = (answer.outcome for answer in answers)
            if control.status in FAILING:
                continue
            finished = outcome.record(bug.first.number, self.fault.where, variant)
            violation = next(bug.similar(finished), None)
            if violation is not None:
                found = better(found, parted(variant, violation))
                if found.violation.causes:
                    break
        if found is not None:
            self._findings.part(bug, found)
            self.row = replace(self.row, parted=found.violation.attribution)
            self._shown()

    def _count(self, outcome: Outcome) -> None:
        self.row = replace(
            self.row,
            cases=self.row.cases + 1,
            unsupported=self.row.unsupported + (outcome.status == "unsupported"),
            seconds=self.row.seconds + outcome.seconds,
        )

    def _failed(self, number: int, case: Case, outcome: Outcome) -> None:
        self._findings.add(outcome.record(number - 1, self.fault.where, case))
        self._sizes.add(case.world_size)
        bug = self._findings.bugs[0]
        if not self.row.caught:
            caught_by = bug.status if bug.violation is None else bug.violation.obligation
            self.row = replace(self.row, caught_by=caught_by, case=case)
        self.row = replace(
            self.row,
            failing=self.row.failing + 1,
            attributions=(*self.row.attributions, _attribution(outcome, self.fault)),
        )
        self._shown()

    def _shown(self) -> None:
        bug, *others = [one for one in self._findings.bugs if one.merged is None]
        self.row = replace(
            self.row,
            title=bug.title,
            causes=bug.causes,
            other_causes=tuple(dict.fromkeys(cause for one in others for cause in one.causes)),
            findings=len(others) + 1,
        )


SOLVED = frozenset(("update",))
"""Obligations whose causes are found by solving: of these attribution and causes are one."""


def rubric(fault: Fault) -> str:
    """Return the regular expression that the attribution of a fault must match, "" for none.

    That of the fault, or that of its cause: the operation that is wrong, with the class of tensors,
    the ranks or the steps where they are part of the bug.
    """
    if fault.attributed:
        return fault.attributed
    if fault.obligation in SOLVED:
        return "|".join(map(re.escape, fault.causes))
    found = [find(text) for text in fault.causes]
    return next((one.attributed for one in found if one is not None and one.attributed), "")


def _attribution(outcome: Outcome, fault: Fault) -> str:
    """Return what attribution says of the violations of the fault's obligation, or of the first."""
    judgement = outcome.judgement
    if judgement is None:
        return ""
    every = [part for one in judgement.violations for part in (one, *one.parts)]
    chosen = [one for one in every if one.obligation == fault.obligation] or every[:1]
    parts = [
        part
        for one in chosen
        for part in (one.attribution, *(one.causes if one.obligation in SOLVED else ()))
    ]
    return "; ".join(dict.fromkeys(part for part in parts if part))
