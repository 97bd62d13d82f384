"""Known-issue matcher of one run: cases that it adds or leaves out, and stale issues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from ...case.features import features
from ...case.schema import Case, Optimizer
from ...case.segments import segments_of
from ...catalogue import family
from ...protocol.verdicts import EQUIVALENCE, RESUME, Status, Violation
from ..known_issues.entries import KnownIssue, matching, ours
from ..known_issues.releases import Releases, library_of
from ..plan.options import RunOptions
from ..plan.plan import PlannedCase
from ..plan.profiles import PROFILES
from ..records.records import CaseFinished, KnownReference, LeftOut, StaleIssue, Unverified
from ..records.tally import FAILING
from .consequences import sources_of


class KnownIssueMatcher:
    """Known-issue matcher for the issues of this run's implementations, obligations and releases.

    A run without an obligation of checkpoints takes none, so issues with such a case are left out.
    """

    def __init__(self, options: RunOptions, releases: Releases) -> None:
        self._options = options
        self._releases = releases
        resumes = bool(set(options.obligations) & set(RESUME))
        here = [
            issue
            for issue in options.issues
            if any(issue.implementation in family(name) for name in options.implementations)
            and (resumes or issue.case is None or not issue.case.resume)
            and issue.known_in(releases)
            and issue.shows_on(options.device)
        ]
        asked = (None, *options.obligations)
        self.issues = [issue for issue in here if issue.obligation in asked]
        self._after_loads = [
            issue
            for issue in here
            if issue not in self.issues
            and issue.obligation in EQUIVALENCE
            and "continuation" in options.obligations
        ]
        """Of steps: they can show in steps after a load, and nowhere else in this run."""
        self.own: dict[int, KnownIssue] = {}
        """Number of a case in the plan -> the issue whose own case it is."""
        self._shown: set[KnownIssue] = set()
        self._own_status: dict[KnownIssue, Status] = {}
        self._looked: set[KnownIssue] = set()

    @property
    def unverified(self) -> tuple[Unverified, ...]:
        """Issues that were not measured in this run's releases: they may be gone there."""
        of: dict[str, list[KnownReference]] = {}
        for issue in self.issues:
            library = issue.unmeasured(self._releases)
            if library:
                of.setdefault(library, []).append(issue.record)
        return tuple(
            Unverified(release=f"{library} {self._releases.plain(library)}", known=tuple(known))
            for library, known in of.items()
        )

    def arrange(
        self, planned: Sequence[PlannedCase]
    ) -> tuple[list[PlannedCase], tuple[LeftOut, ...]]:
        """Return the plan without cases of known hangs, and with the issues' own cases.

        An own case is left away if the run was asked for other world sizes or features, or for
        another model or optimizer, and in a first look where another one shows the same fault.
        """
        left_out: Counter[tuple[str, KnownIssue]] = Counter()
        kept = []
        for item in planned:
            hang = self._hang(item)
            if hang is None:
                kept.append(item)
            else:
                left_out[item.implementation, hang] += 1
        for issue, case in self._own_cases():
            self.own[len(kept)] = issue
            kept.append(PlannedCase(issue.implementation, case))
        return kept, tuple(
            LeftOut(implementation=name, count=count, known=issue.record)
            for (name, issue), count in left_out.items()
        )

    def _own_cases(self) -> Iterator[tuple[KnownIssue, Case]]:
        options = self._options
        once = PROFILES[options.profile].each_fault_once
        shown = set()
        for issue in self.issues:
            case = issue.case
            if (
                case is None
                or (once and issue.page and issue.page in shown)
                or (case.model.user.factory if case.model.user else None) != options.model
                or _optimizer(case) != (options.optimizer or Optimizer().kind)
                or issue.implementation not in options.implementations
                or not {segment.world_size for segment in segments_of(case)}
                <= set(options.world_sizes)
                or not set(options.features) <= set(features(case))
            ):
                continue
            shown.add(issue.page)
            yield issue, case

    def hang(self, item: PlannedCase) -> str | None:
        """Return the known hang that covers a case, as a reason not to run it."""
        issue = self._hang(item)
        return None if issue is None else f"known hang: {issue.record.reason}"

    def _hang(self, item: PlannedCase) -> KnownIssue | None:
        return next((issue for issue in self.issues if _hangs_by(item, issue)), None)

    def issue_of(self, finished: CaseFinished, violation: Violation | None) -> KnownIssue | None:
        """Return the first issue that matches this failure; all that match count as observed."""
        matching = self._matching(finished, violation)
        self._shown.update(matching)
        return matching[0] if matching else None

    def similar(self, finished: CaseFinished, violation: Violation | None) -> KnownReference | None:
        """Return the first issue that comes with zerocheck and matches but for the implementation.

        A violation must have the cause of the issue, and a crash or hang its words; what the case
        of a crash has may be fixed in the code, where no feature shows it.
        """
        own = family(finished.implementation)
        for issue in ours():
            known_by = issue.says if violation is None else violation.causes
            if issue.implementation in own or not known_by or not issue.known_in(self._releases):
                continue
            here = issue.of(finished.implementation, anywhere=violation is None)
            if matching((here,), finished, violation):
                return issue.record
        return None

    def listed(self, finished: CaseFinished, violation: Violation | None) -> bool:
        """Return True if this failure is a known issue, without noting that it was observed."""
        return bool(self._matching(finished, violation))

    def _matching(self, finished: CaseFinished, violation: Violation | None) -> list[KnownIssue]:
        return matching((*self.issues, *self._after_loads), finished, violation)

    def marked(self, finished: CaseFinished) -> CaseFinished:
        """Return the record of a case, with the known issues of its failures marked.

        A violation that follows from others is known if all of those are. To count as observed it
        is enough that an issue shows in the wake of another violation.
        """
        own_issue = self.own.get(finished.number)
        if own_issue is not None and finished.status != "unsupported":
            self._own_status[own_issue] = finished.status
        self._looked.update(
            issue
            for issue in self.issues
            if finished.status != "unsupported"
            and issue.implementation == finished.implementation
            and issue.covers(finished.case)
        )
        if finished.status in ("crashed", "hung"):
            known = self.issue_of(finished, None) is not None
            return replace(finished, known=self._options.obligations if known else ())
        if finished.status != "violated" or finished.judgement is None:
            return finished
        judgement = finished.judgement
        for violation in (*judgement.violations, *judgement.further):
            for part in (violation, *violation.parts):
                self.issue_of(finished, part)
        sources = sources_of(judgement, lambda one: self.listed(finished, one))
        hidden = {v.obligation for v in sources if not self.listed(finished, v)}
        listed = list(dict.fromkeys(v.obligation for v in sources if v.obligation not in hidden))
        if not hidden:
            statuses = judgement.statuses
            listed = [obligation for obligation, s in statuses.items() if s in FAILING]
        return replace(finished, known=tuple(listed))

    def unseen(self) -> list[tuple[KnownIssue, int | None]]:
        """Return issues that were expected and not observed, and the number of their own case.

        For an issue without a case of its own, another case with its features must have run. One
        that shows sometimes is never missed, nor is one that was not measured in this release; nor
        is one without a case in a run of the user's own model, which shows little of what drawn
        ones do.
        """
        looked = self._looked if self._options.model is None else ()
        numbers = {issue: number for number, issue in self.own.items()}
        return [
            (issue, numbers.get(issue))
            for issue in self.issues
            if issue not in self._shown
            and not issue.sometimes
            and not issue.unmeasured(self._releases)
            and (issue in looked if issue.case is None else issue in self._own_status)
        ]

    def shown(self, issue: KnownIssue) -> bool:
        """Return True if any case showed the issue."""
        return issue in self._shown

    def stale(self, issue: KnownIssue, tries: int) -> StaleIssue:
        """Return the record of a stale issue.

        tries: runs of its own case in fresh rank processes.
        """
        if issue.case is None:
            reason = "it has no case of its own, and no case of this run showed it"
        else:
            reason = (
                f"its own case {_in_words(self._own_status[issue])}, does not show it in {tries} "
                "fresh rank processes either, and no other case showed it"
            )
        library = library_of(issue.implementation)
        version = self._releases.plain(library)
        return StaleIssue(
            implementation=issue.implementation,
            known=issue.record,
            seen=reason,
            advice=f"remove {issue.source}, or let its {library} versions end before {version}",
            obligation=issue.obligation,
        )


def _optimizer(case: Case) -> str:
    """Return the optimizer of a case, as a run asks for it."""
    user = case.optimizer.user
    return case.optimizer.kind if user is None else user.location


def _hangs_by(item: PlannedCase, issue: KnownIssue) -> bool:
    same = issue.implementation in family(item.implementation)
    return issue.hangs and same and issue.covers(item.case)


def _in_words(status: Status) -> str:
    if status == "violated":
        return "is violated in another way"
    if status in FAILING:
        return f"{status} in another way"
    return "holds"
