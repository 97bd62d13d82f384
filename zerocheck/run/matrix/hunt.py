"""The search for one fault: the cases of a run of the faulty code, until it is caught."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from ...case.schema import Case
from ...faults.catalogue import Fault
from ..findings import Findings
from ..plan import Plan
from ..tally import FAILING
from ..trial import Outcome
from .records import FaultTried, Rivals
from .rivals import freely, usually
from .together import Ask

FAILING_CASES = 3
"""Failing cases over which causes are intersected. Two causes that coincide in one case do so since
two of its numbers are equal, mostly ranks and microbatches; a third case is for chance."""

MORE_CASES = 12
"""Cases after the one that caught it, at most: a fault that needs a rare feature may fail no other
soon."""


@dataclass(frozen=True)
class Answer:
    """What came of a case: how it was judged, or, if it was trained freely, what the rivals say."""

    outcome: Outcome | None = None
    rivals: Rivals | None = None


class Hunt:
    """One row of the matrix. `row` is what is known so far."""

    def __init__(
        self,
        fault: Fault,
        *,
        plan: Callable[[], Plan],
        fixed: Callable[[], Mapping[str, object]],
        done: Callable[[Hunt], None],
    ) -> None:
        """plan(): the cases; fixed(): fields of cases that the implementation fixes; both are
        asked for when the search begins. done(hunt): it is over."""
        self._fault = fault
        self._plan = plan
        self._fixed = fixed
        self._done = done
        self._findings = Findings()
        self.row = FaultTried(
            fault=fault.name,
            where=fault.where,
            parent=fault.parent,
            summary=fault.summary,
            source=fault.source,
            expected=fault.obligation,
            true_causes=fault.causes,
        )

    def search(self) -> Generator[Ask, Answer, None]:
        """Ask for cases until the row is whole."""
        yield from self._catch()
        if self.row.case is not None:
            case = freely(self.row.case, self._fixed())
            rivals, control = yield from self._rivals(case)
            self.row = replace(self.row, rivals=rivals, control=control)
            rivals, control = yield from self._rivals(usually(case, self._fixed()))
            self.row = replace(self.row, usual_rivals=rivals, usual_control=control)
        self._done(self)

    def _rivals(self, case: Case) -> Generator[Ask, Answer, tuple[Rivals | None, Rivals | None]]:
        """On the fault, and on its parent."""
        faulty = yield Ask(self._fault.where, case, free=True)
        parent = yield Ask(self._fault.parent, case, free=True)
        return faulty.rivals, parent.rivals

    def _catch(self) -> Generator[Ask, Answer, None]:
        """Until enough cases failed. One that the parent fails too says nothing of the fault."""
        plan = self._plan()
        number = after = 0
        while number < len(plan.cases) or plan.more():
            item = plan.cases[number]
            number += 1
            outcome = (yield Ask(item.implementation, item.case)).outcome
            assert outcome is not None
            refused = outcome.status == "unsupported"
            if refused or outcome.judgement is not None:
                plan.note(item, refused=refused)
            if not self.row.caught:
                self._count(outcome)
            if outcome.status in FAILING:
                control = (yield Ask(self._fault.parent, item.case)).outcome
                assert control is not None
                if control.status not in FAILING:
                    self._failed(number, item.case, outcome)
                elif not self.row.caught:
                    self.row = replace(self.row, parents=self.row.parents + 1)
            if self.row.caught:
                broken = self._fault.obligation is None  # it has no cause to be named
                if broken or self.row.failing == FAILING_CASES or after == MORE_CASES:
                    return
                after += 1

    def _count(self, outcome: Outcome) -> None:
        self.row = replace(
            self.row,
            cases=self.row.cases + 1,
            unsupported=self.row.unsupported + (outcome.status == "unsupported"),
            seconds=self.row.seconds + outcome.seconds,
        )

    def _failed(self, number: int, case: Case, outcome: Outcome) -> None:
        self._findings.add(outcome.record(number - 1, self._fault.where, case))
        bug, *others = self._findings.bugs
        if not self.row.caught:
            caught_by = bug.status if bug.violation is None else bug.violation.obligation
            self.row = replace(self.row, caught_by=caught_by, case=case)
        self.row = replace(
            self.row,
            title=bug.title,
            failing=self.row.failing + 1,
            causes=bug.causes,
            other_causes=tuple(dict.fromkeys(cause for one in others for cause in one.causes)),
            findings=len(others) + 1,
        )
