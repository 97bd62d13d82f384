"""Findings from failing cases: one bug is one finding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from ...case.schema import Case
from ...causes import FACTORS, GRADIENT_SCALED, HINTS
from ...protocol.verdicts import RESUME, Status, Violation
from ..known_issues.entries import KnownIssue
from ..records.records import CaseFinished, Finding
from .bug import Bug, HeldCase, Parted, words_of
from .consequences import sources_of
from .contrast import WrongCase

IssueOf = Callable[[CaseFinished, Violation | None], KnownIssue | None]
"""The listed known issue that a failure of a case is, if it is one."""


class Findings:
    """Collection of failing cases; `add` returns the bugs that are new, or whose cause is updated.

    A failure that is a listed known issue belongs to that issue and to nothing else, so that no
    other bug hides behind it.
    """

    def __init__(self, issue_of: IssueOf = lambda finished, violation: None) -> None:
        self.bugs: list[Bug] = []
        self.of_last: list[Bug] = []
        """Bugs that the last case shows."""
        self._issue_of = issue_of
        self._held: list[HeldCase] = []

    def held(self, bug: Bug) -> list[Case]:
        """Return the cases that hold though they could have shown the bug."""
        return [held.case for held in self._held if held.could_show(bug)]

    def add(self, finished: CaseFinished) -> list[Bug]:
        """Take one case. A case that holds, or is unsupported, makes no bug."""
        self.of_last = []
        if finished.judgement is not None:
            self._held.append(HeldCase.of(finished))
        if finished.status in ("crashed", "hung"):
            return self._merge(finished, finished.status, None)
        if finished.judgement is None:
            return []
        new: list[Bug] = []
        reported: set[object] = set()
        judgement = finished.judgement
        for violation in sources_of(judgement, lambda v: self._issue_of(finished, v) is not None):
            kind = (violation.obligation, violation.role, violation.causes)
            issue = self._issue_of(finished, violation)
            if kind not in reported and issue not in reported:
                new += self._merge(finished, "violated", violation)
            reported |= {kind} if issue is None else {kind, issue}
        return new

    def part(self, bug: Bug, parted: Parted) -> list[Bug]:
        """Take what a case with distinct numbers says of a bug; return others that this changes.

        Its causes refute those that coincide in the cases so far, and make one bug of those that
        they explain together: on 2 ranks a gradient that is reduced within each half looks local,
        on 3 it does not.
        """
        bug.parted = parted
        causes = parted.violation.causes
        others: list[Bug] = []
        if not causes:
            return others
        common = tuple(cause for cause in bug.causes if cause in causes)
        bug.refuted = tuple(cause for cause in (*bug.refuted, *bug.causes) if cause not in causes)
        if not common:
            bug.listed = bug.listed or bug.causes
        bug.causes = common or causes
        for other in self.bugs:
            shared = tuple(cause for cause in other.causes if cause in bug.causes)
            if other is not bug and shared and other.merged is None and _one_kind(bug, other):
                first, second = sorted((bug, other), key=self.bugs.index)
                first.causes, first.parted = shared, first.parted or second.parted
                refuted = dict.fromkeys((*first.refuted, *second.refuted))
                first.refuted = tuple(cause for cause in refuted if cause not in shared)
                first.cases += second.cases
                first.shown += second.shown
                second.merged = self.bugs.index(first)
                others.append(other)
                bug = first
        return others

    def _merge(
        self, finished: CaseFinished, status: Status, violation: Violation | None
    ) -> list[Bug]:
        causes = () if violation is None else violation.causes
        issue = self._issue_of(finished, violation)
        for bug in self.bugs:
            if bug.merged is not None:
                continue
            if bug.issue == issue and _same_kind(bug, finished, status, violation):
                common = common_causes(bug.causes, causes)
                if not common and not {*causes}.isdisjoint(bug.refuted):
                    common = bug.causes
                # A crash or hang has causes only once it is traced.
                if common or violation is None or not (bug.causes or causes):
                    bug.cases += 1
                    self._show(bug, finished, violation)
                    if bug.suspicion:
                        bug.reproduce(common, finished, violation)
                        return [bug]
                    if issue is not None and finished.case == issue.case:
                        # The small case that is listed, rather than the first that came by.
                        bug.first, bug.violation = finished, violation
                        return [bug]
                    return [bug] if bug.narrow(common, finished, violation) else []
        if violation is not None and issue is None:
            for bug in self._faintly(finished, violation):
                bug.cases += 1
                self._show(bug, finished, violation)
                telling = not violation.faint and bug.narrow(causes, finished, violation)
                return [bug] if telling else []
        words = words_of(finished, violation)
        bug = Bug(finished.implementation, status, violation, causes, finished, issue, words=words)
        self.bugs.append(bug)
        self._show(bug, finished, violation)
        return [bug]

    def _show(self, bug: Bug, finished: CaseFinished, violation: Violation | None) -> None:
        """Note that the last case shows a bug."""
        bug.shown.append(WrongCase.of(finished.case, violation))
        self.of_last.append(bug)

    def _faintly(self, finished: CaseFinished, violation: Violation) -> Iterator[Bug]:
        """Iterate over bugs of the same kind that a violation belongs to whatever its causes are.

        One of the two says too little to tell one cause from another.
        """
        for bug in self.bugs:
            if bug.merged is None and bug.issue is None and bug.violation is not None:
                faint = violation.faint or bug.violation.faint
                if faint and _same_kind(bug, finished, "violated", violation):
                    yield bug


def common_causes(causes: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    """Return the causes that two violations can have in common.

    A hint explains what has no cause, and a factor without a name those that have one: it is 2 on
    2 ranks, and 5 on 3.
    """
    common = tuple(cause for cause in causes if cause in others)
    if common or not (causes and others):
        return common or (causes or others if HINTS.issuperset(causes or others) else ())
    named = others if causes == (GRADIENT_SCALED,) else causes
    scaled = (GRADIENT_SCALED,) in (causes, others)
    return (GRADIENT_SCALED,) if scaled and {*named} <= FACTORS else ()


def failures_of(record: CaseFinished, causes: Collection[str] = ()) -> list[Finding]:
    """Return the failures of one case, each in the form of a finding; empty if all holds.

    causes: of a finding, those that explain all failing cases of a run; others are not named.
    """
    bugs = Findings().add(record)
    for bug in bugs:
        if bug.violation is not None:
            bug.causes = bug.violation.narrowed(causes).causes
    return [bug.finding(number) for number, bug in enumerate(bugs)]


def _one_kind(bug: Bug, other: Bug) -> bool:
    if bug.violation is None or other.violation is None:
        return False
    return (
        bug.implementation == other.implementation
        and bug.issue == other.issue
        and _alike(bug.violation, other.violation)
    )


def _same_kind(
    bug: Bug, finished: CaseFinished, status: Status, violation: Violation | None
) -> bool:
    if bug.implementation != finished.implementation or bug.status != status:
        return False
    if violation is None or bug.violation is None:
        return violation is bug.violation and bug.first.error == finished.error
    return _alike(bug.violation, violation)


def _alike(one: Violation, other: Violation) -> bool:
    """Return True if two violations can be of one bug.

    A load may lose one role in one case, another in the next, depending on the state of the case;
    a wrong step whose cause is known shows in the first role that it changes.
    """
    if one.obligation != other.obligation:
        return False
    named = one.obligation == "update" and one.causes and other.causes
    return one.obligation in RESUME or one.role == other.role or bool(named)
