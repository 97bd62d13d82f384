"""Counts over the records of a run. A pure function of them; every report starts here."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from ...case.features import features, groups
from ...case.shapes import parameter_shapes
from ...errors import ExitCode
from ...protocol.verdicts import DECLARES, EQUIVALENCE, Obligation, Status
from .case_counts import outcomes, unsupported_lines
from .coverage import FEW, CoveredPairs
from .footprint import Footprint
from .footprint import add as add_footprint
from .loads import Loads, sum_loads
from .margins import Margins
from .records import CaseFinished, Coverage, Finding, Record, RunFinished, RunStarted, StaleIssue

FAILING: tuple[Status, ...] = ("violated", "crashed", "hung")
"""Verdicts that make a run fail."""

_LOOKED_AT: tuple[Status, ...] = (*FAILING, "known", "holds")

# What one word for several cases is: the first of these that any case has.
_WORST_FIRST: tuple[Status, ...] = (*FAILING, "known", "holds", "unsupported", "not exercised")


@dataclass
class Cell:
    """Counts of one obligation of one implementation, over all cases.

    counts: cases per verdict; share: largest part of the bound that was used, 1.0 is the edge;
    broken: known crashes and hangs, after which the obligation could not be looked at; vacuous:
    cases in which it holds since nothing could fail; estimated: cases in which it holds by a bound
    that is estimated; groups: judged cases in which it was looked at, by the groups of features
    that they say something of; features: cases by feature and verdict, but for those in which it
    holds since nothing could fail; margins: how near to the bound they came.
    """

    counts: Counter[Status] = field(default_factory=Counter)
    share: float = 0.0
    broken: int = 0
    vacuous: int = 0
    estimated: int = 0
    groups: Counter[str] = field(default_factory=Counter)
    features: Counter[tuple[str, Status]] = field(default_factory=Counter)
    margins: Margins = field(default_factory=Margins)

    @property
    def checked(self) -> int:
        """Number of cases in which the obligation was checked, whatever the result."""
        return sum(self.counts[status] for status in _LOOKED_AT) - self.broken

    @property
    def only_broken(self) -> bool:
        """True if cases crashed or hung, and no other one said anything of it."""
        looked_at = sum(self.counts[status] for status in ("violated", "holds", "not exercised"))
        broken = self.counts["crashed"] + self.counts["hung"]
        return broken > 0 and not looked_at and self.counts["known"] == self.broken

    @property
    def informative(self) -> int:
        """Number of cases in which the obligation was checked and could have failed."""
        return self.checked - self.vacuous

    @property
    def status(self) -> Status:
        """Verdict over all cases: a failing one if there is any."""
        return next((s for s in _WORST_FIRST if self.counts[s]), "not exercised")


@dataclass
class ImplementationTally:
    """Counts over all cases of one implementation."""

    name: str
    cells: dict[Obligation, Cell]
    cases: Counter[Status] = field(default_factory=Counter)
    world_sizes: Counter[int] = field(default_factory=Counter)
    covered: CoveredPairs = field(default_factory=CoveredPairs)
    loads: Loads = field(default_factory=Loads)
    weights: dict[int, Footprint] = field(default_factory=dict)
    """What measured cases hold and send, by world size."""
    unsupported: Counter[str] = field(default_factory=Counter)
    """Unsupported cases by reason."""
    unjudged: Counter[str] = field(default_factory=Counter)
    """Judged cases in which an obligation was not judged, by reason."""
    tiers: Counter[str] = field(default_factory=Counter)
    leaks: Counter[str] = field(default_factory=Counter)
    """Global state that cases left changed in their rank processes, and in how many cases."""
    placement: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """By world size and kind of state, the largest part that a rank holds in each case."""
    stage: int | None = None
    """Declared by the implementation: see Implementation.stage."""
    steps: int = 0
    """Most steps of a judged case."""
    elements: int = 0
    """Elements of the largest parameter of a judged case."""
    semantics: dict[str, str] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)
    """Obligations that no case of it can exercise, and why, as it says."""
    seconds: float = 0.0
    _run: list[bytes] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Digest of all cases that were run, in any order: equal for two runs of the same cases."""
        whole = hashlib.blake2b(b"".join(sorted(self._run)), digest_size=16)
        return whole.hexdigest() if self._run else ""

    @property
    def hardly_checked(self) -> dict[Obligation, Cell]:
        """Obligations that could have failed in fewer than FEW cases."""
        return {o: cell for o, cell in self.cells.items() if cell.informative < FEW}

    @property
    def nothing_checked(self) -> bool:
        """True if no obligation was checked in any case."""
        return not any(cell.checked for cell in self.cells.values())

    @property
    def known_crashes(self) -> int:
        """Number of cases that crashed or hung by a known issue."""
        return max((cell.broken for cell in self.cells.values()), default=0)

    def add(self, record: CaseFinished) -> None:
        """Count one case."""
        judgement = record.judgement
        self.cases[status_of_case(record)] += 1
        self.seconds += record.seconds
        self._run.append(hashlib.blake2b(msgspec.json.encode(record.case), digest_size=16).digest())
        self.covered.add(record)
        self.loads.add(record, self.cells)
        self.leaks.update(set(record.leaks))
        add_footprint(self.weights, record)
        if record.status == "unsupported":
            self.unsupported[record.reason or "no reason given"] += 1
        elif judgement is not None:
            self.world_sizes[record.case.world_size] += 1
            self.steps = max(self.steps, record.case.training.steps)
            shapes = parameter_shapes(record.case.model).values()
            self.elements = max(self.elements, max(map(math.prod, shapes), default=0))
            self.tiers[judgement.tier] += 1
            self.stage = judgement.stage if judgement.stage is not None else self.stage
            for kind, share in judgement.shares.items():
                kinds = self.placement.setdefault(record.case.world_size, {})
                kinds.setdefault(kind, []).append(share)
            self.semantics = judgement.semantics or self.semantics
            self.unjudged.update(set(judgement.unjudged.values()))
        groups_of_case = groups(record.case, self.covered.ignored)
        has = [name for name in features(record.case) if name not in self.covered.ignored]
        for obligation, cell in self.cells.items():
            status = _status_of(record, obligation)
            cell.counts[status] += 1
            if judgement is not None and status in _LOOKED_AT:
                cell.groups.update(groups_of_case)
            cell.broken += status == "known" and judgement is None
            vacuous = judgement is not None and obligation in judgement.vacuous
            if status in _LOOKED_AT and not vacuous:
                cell.features.update((name, status) for name in has)
            cell.vacuous += vacuous
            if judgement is not None:
                cell.estimated += status == "holds" and obligation in judgement.estimated
                cell.margins.add(judgement, obligation)
                share = judgement.share.get(obligation, 0.0)
                cell.share = max(cell.share, math.inf if math.isnan(share) else share)


def _status_of(record: CaseFinished, obligation: Obligation) -> Status:
    """Return the verdict of a case on one obligation.

    A crash or hang leaves all open ones failing.
    """
    if obligation in record.known:
        return "known"
    if record.judgement is not None and obligation in record.judgement.statuses:
        return record.judgement.statuses[obligation]
    return "not exercised" if record.status in ("holds", "violated") else record.status


def status_of_case(record: CaseFinished) -> Status:
    """Return the status of a case, `known` if all that failed is a known issue."""
    if record.status not in FAILING or not record.known:
        return record.status
    statuses = record.judgement.statuses if record.judgement is not None else {}
    failing = {obligation for obligation, status in statuses.items() if status in FAILING}
    return "known" if failing <= set(record.known) else record.status


class Tally:
    """Counts of a run, built record by record."""

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.finished: RunFinished | None = None
        self.obligations: tuple[Obligation, ...] = EQUIVALENCE
        self.implementations: dict[str, ImplementationTally] = {}
        self._findings: dict[int, Finding] = {}
        self.stale: list[StaleIssue] = []
        self.cases = 0

    def add(self, record: Record) -> None:
        """Count one more record."""
        match record:
            case RunStarted():
                self.started = record
                self.obligations = record.obligations or EQUIVALENCE
                for name in record.implementations:
                    self._of(name).without = record.without_of.get(name, {})
            case Coverage():
                self._of(record.implementation).covered = CoveredPairs(record)
            case CaseFinished():
                self.cases += 1
                self._of(record.implementation).add(record)
            case Finding():
                self._findings[record.number] = record
            case StaleIssue():
                self.stale.append(record)
            case RunFinished():
                self.finished = record

    def _of(self, name: str) -> ImplementationTally:
        if name not in self.implementations:
            cells = {obligation: Cell() for obligation in self.obligations}
            self.implementations[name] = ImplementationTally(name, cells)
        return self.implementations[name]

    @property
    def findings(self) -> list[Finding]:
        """Findings as last written, in the order of discovery.

        Known ones and those that could not be reproduced are left out.
        """
        return [one for one in self._all() if one.known is None and not one.suspicion]

    @property
    def unreproduced(self) -> list[Finding]:
        """Findings that failed once, and in no fresh rank processes. They do not fail the run."""
        return [finding for finding in self._all() if finding.suspicion]

    @property
    def known(self) -> list[Finding]:
        """Findings that are listed known issues."""
        return [finding for finding in self._all() if finding.known is not None]

    def _all(self) -> list[Finding]:
        found = (self._findings[number] for number in sorted(self._findings))
        return [one for one in found if one.merged is None]

    @property
    def loads(self) -> Loads:
        """Loads of resumed cases, of all implementations together."""
        return sum_loads(one.loads for one in self.implementations.values())

    @property
    def planned(self) -> int:
        """Number of cases to run, as far as known: the announced ones, and those added since."""
        return max(self.cases, self.started.planned if self.started is not None else 0)

    @property
    def statuses(self) -> Counter[Status]:
        """Cases of all implementations by status; they add up to `cases`."""
        total: Counter[Status] = Counter()
        for implementation in self.implementations.values():
            total.update(implementation.cases)
        return total

    @property
    def outcomes(self) -> str:
        """Text of all cases by status, such as `"48 cases: 31 passed, 17 unsupported"`."""
        return outcomes(self.statuses, self.started.planned if self.started is not None else 0)

    @property
    def unsupported_lines(self) -> list[str]:
        """Commonest reasons for which cases are unsupported, a line each."""
        return unsupported_lines(one.unsupported for one in self.implementations.values())

    @property
    def complete(self) -> bool:
        """True if the run came to its end."""
        return self.finished is not None and self.finished.outcome == "done"

    def findings_of(
        self, implementation: str, obligation: Obligation | None = None
    ) -> list[Finding]:
        """Return the findings of one implementation.

        With an obligation, those of it, and the crashes and hangs.
        """
        return [
            finding
            for finding in self.findings
            if finding.implementation == implementation
            and (obligation is None or finding.obligation in (obligation, None))
        ]


def concerns(issue: Finding | StaleIssue, implementation: str, obligation: Obligation) -> bool:
    """Return True if the issue is of this implementation and obligation.

    A crash or hang concerns all obligations.
    """
    same = issue.implementation == implementation
    return same and issue.obligation in (obligation, None)


def tally(records: Iterable[Record]) -> Tally:
    """Count all records of a run."""
    counted = Tally()
    for record in records:
        counted.add(record)
    return counted


def why(counted: Tally) -> tuple[str, ...]:
    """Return why the run fails, one plain sentence each; empty if all obligations hold."""
    reasons = [reason for name in counted.implementations for reason in why_of(counted, name)]
    reasons += [
        f"{stale.implementation}: a known issue is stale: {stale.known.fingerprint} "
        f"({stale.known.source})"
        for stale in counted.stale
    ]
    return tuple(reasons)


def why_of(counted: Tally, name: str) -> list[str]:
    """Return why one implementation fails the run, stale known issues aside; see `why`."""
    implementation = counted.implementations[name]
    reasons: list[str] = []
    records = counted.findings_of(name)
    findings = f"{len(records)} finding{'s' if len(records) != 1 else ''}"
    stopped = next((finding for finding in records if finding.left_out), None)
    if stopped is not None:
        place = f" at {stopped.place}" if stopped.place else ""
        return [
            f"{name}: stopped after {stopped.cases} cases that crash alike{place}, as the simplest "
            f"case does ({findings}): {stopped.left_out} cases were not run"
        ]
    failing = any(implementation.cases[status] for status in FAILING)
    if failing or records:
        alone = len(counted.implementations) == 1
        cases = counted.outcomes if alone else outcomes(implementation.cases)
        reasons.append(f"{name}: {f'{findings} in ' if records else ''}{cases}")
    if counted.finished is not None and counted.finished.outcome == "interrupted":
        return reasons  # what was not checked may stand in a case that was not run
    if counted.started is not None and counted.started.shard:
        return reasons  # or in another shard
    left_out = implementation.covered.sentence(name)
    if left_out:
        reasons.append(left_out)
    if implementation.nothing_checked:
        return [*reasons, f"{name}: nothing was checked: {why_nothing(implementation)}"]
    if failing:
        return reasons  # a case that failed early may have been the one for an obligation
    for obligation, cell in implementation.cells.items():
        if not cell.checked and obligation not in implementation.without:
            reasons.append(
                f"{name}: nothing was checked for {obligation}: "
                f"none of {sum(cell.counts.values())} cases exercised it "
                f"({leaving_out('--obligations', obligation)})"
            )
    return reasons


def leaving_out(option: str, obligation: Obligation) -> str:
    """Return what to do about an obligation that no case exercised."""
    declare = DECLARES.get(obligation)
    return f"{option} can leave it out" + (f"; or {declare}" if declare else "")


def unchecked(counted: Tally) -> Iterator[tuple[str, Obligation, str]]:
    """Yield (implementation, obligation, reason) for obligations that no case can exercise.

    The implementation declares so, and no case did.
    """
    for name, implementation in counted.implementations.items():
        for obligation, cell in implementation.cells.items():
            if obligation in implementation.without and not cell.checked:
                yield name, obligation, implementation.without[obligation]


def why_nothing(implementation: ImplementationTally) -> str:
    """Return why no obligation of the implementation was checked."""
    cases = sum(implementation.cases.values())
    if not cases:
        return "no case was run"
    refused = implementation.unsupported or implementation.unjudged
    if refused:
        reason, count = refused.most_common(1)[0]
        count = max(count, implementation.cases["unsupported"])
        return f"{count} of {cases} cases are unsupported, most often since {reason}"
    return f"none of {cases} cases exercised an obligation"


def exit_code(counted: Tally) -> ExitCode:
    """Return HOLDS if all obligations hold, known issues aside, else FAILS.

    FAILS is for a finding, a failing case, an obligation unchecked, a stale known issue, or a
    supported pair of features that was to be covered and was not.
    """
    return ExitCode.FAILS if why(counted) else ExitCode.HOLDS


def run_exit_code(counted: Tally) -> int:
    """Return the exit code of the whole run.

    As `exit_code`; INTERRUPTED if it did not come to its end, and if it lost its ranks the code
    that it recorded.
    """
    if counted.finished is not None and counted.finished.outcome == "lost":
        return counted.finished.exit_code
    return exit_code(counted) if counted.complete else ExitCode.INTERRUPTED
