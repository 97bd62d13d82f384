"""Engine: plans cases, runs and judges them, and sends records to its handlers."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from .. import signals
from ..case.schema import Case
from ..catalogue import is_built_in
from ..errors import ExitCode, RanksLost, UsageError
from ..judge.local import as_on_a_rank
from ..protocol.verdicts import RESUME
from ..ranks.limits import check_world_size
from ..ranks.torchrun import TorchrunPool
from .drift import DriftRuns
from .execute.environment import environment
from .execute.host_memory import check as check_room
from .execute.host_memory import must_run_alone
from .execute.launch import with_ranks_of
from .execute.outcome import Results
from .execute.rank_pool import RankPool
from .execute.rank_requests import check_builds, describe, refusals
from .execute.trial import Trial
from .execute.user_model import with_models
from .execute.user_optimizer import with_optimizers
from .findings.bug import Bug
from .findings.case_file import of_bug, write
from .findings.confirmation import TRIES, confirm
from .findings.findings import Findings
from .findings.issue_matcher import KnownIssueMatcher
from .findings.shrink import RUN_TRIES, Limits, paths, shrink, worth
from .findings.suspicion import Confirmer
from .known_issues.releases import Releases
from .plan.options import RunOptions
from .plan.plan import Plan, PlannedCase, TimingChoice
from .records.exercised import idle
from .records.journal import Bus, Handler
from .records.records import (
    CaseFile,
    CaseFinished,
    Finding,
    Outcome,
    Record,
    RunFinished,
    RunStarted,
)
from .records.tally import exit_code, tally, why

HANGS = 3
"""After so many hangs of an implementation, known ones aside, its other cases are left out."""


def run(options: RunOptions, handlers: Sequence[Handler], *, ranks: RankPool | None = None) -> int:
    """Run everything and return the exit code.

    0: all obligations hold; 1: a finding or nothing checked; 3: ranks of a launcher were lost and
    nothing was found before.

    ranks: rank processes that exist already; they are left open.
    Raises UsageError for an implementation that cannot be loaded. On KeyboardInterrupt the journal
    is finished first; then it is raised again.
    """
    if ranks is None:
        return with_ranks_of(options, lambda opened: run(options, handlers, ranks=opened))
    if isinstance(ranks, TorchrunPool):
        options = _on_given_ranks(options, ranks)
    return _RunUnderWay(options, handlers, ranks).run()


def _on_given_ranks(options: RunOptions, ranks: TorchrunPool) -> RunOptions:
    """Return the options for a launcher's ranks: all cases run on all of them, where they are."""
    world_size = ranks.world_size
    if options.world_sizes_given and options.world_sizes != (world_size,):
        raise UsageError(
            f"torchrun started {world_size} ranks; --world-sizes must be {world_size}, or left out"
        )
    if set(options.obligations) & set(RESUME):
        raise UsageError(
            "torchrun's ranks cannot be killed or be another number: resume obligations need "
            "--ranks processes"
        )
    return dataclasses.replace(options, world_sizes=(world_size,), hosts=ranks.hosts)


class _RunUnderWay:
    def __init__(self, options: RunOptions, handlers: Sequence[Handler], ranks: RankPool) -> None:
        self.options = options
        self.ranks = ranks
        self.records: list[Record] = []
        self.bus = Bus((*handlers, _Collector(self.records.append)))
        self.environment = environment(options.device)
        self.issue_matcher = KnownIssueMatcher(options, Releases.of(self.environment))
        self.findings = Findings(self.issue_matcher.issue_of)
        self.reported: dict[int, Finding] = {}
        self.running: Trial | None = None
        self.timed = TimingChoice(options.world_sizes)
        self.hangs: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.folder = Path(options.report_dir) / "findings"

    def run(self) -> int:
        options = self.options
        if options.ranks == "processes":
            check_world_size(max(options.world_sizes))  # before anything is run
        with as_on_a_rank():
            pass  # torch imports a lot the first time; the ranks are importing meanwhile
        described = {
            name: describe(self.ranks, name, world_size=min(options.world_sizes))
            for name in options.implementations
        }
        self.drift_runs = DriftRuns(self.ranks, {n: one.fixed for n, one in described.items()})
        described, without = with_models(self.ranks, described, options)
        size = min(options.world_sizes)
        described = with_optimizers(self.ranks, described, options.optimizer, world_size=size)
        if without:
            options = self.options = options.leaving_out(without)
            self.issue_matcher = KnownIssueMatcher(options, Releases.of(self.environment))
            self.findings = Findings(self.issue_matcher.issue_of)
        self.confirmer = Confirmer(self.findings, self.ranks, options.obligations)
        self.fixed = {name: paths(described[name].fixed) for name in described}
        self.plan = Plan(options, described, self._refusals)
        self.plan.cases, left_out = self.issue_matcher.arrange(self.plan.cases)
        check_room(planned.case for planned in self.plan.cases)
        self._check_builds()
        self.started = time.perf_counter()
        started = RunStarted(
            environment=self.environment,
            implementations=options.implementations,
            obligations=options.obligations,
            profile=options.profile,
            seed=options.seed,
            world_sizes=options.world_sizes,
            planned=len(self.plan.cases),
            started=time.time(),
            left_out=left_out,
            unverified=self.issue_matcher.unverified,
            model=options.model or "",
            without=without,
            without_of={name: one.without for name, one in described.items() if one.without},
        )
        try:
            with signals.deferred():
                self.bus.handle(started)
                for coverage in self.plan.coverage:
                    self.bus.handle(coverage)
            self._cases(self.plan.cases)
            self._stale(self.plan.cases)
            self._shrink()
            self._drift()
            signals.ignore()
        except KeyboardInterrupt:
            signals.ignore()
            self._finish("interrupted")
            raise
        except RanksLost as lost:
            signals.ignore()
            return self._finish("lost", f"{lost}{self._under_way()}")
        return self._finish("done")

    def _check_builds(self) -> None:
        """Raise UsageError for a user's implementation that cannot be judged, before any case."""
        tried: dict[str, list[set[float]]] = {}
        for planned in self.plan.cases:
            name, case = planned.implementation, planned.case
            known = tried.setdefault(name, [])
            rates = {group.lr for group in case.optimizer.groups}
            # Two cases: the rate that an optimizer has by itself may be that of one of them.
            if len(known) < 2 and not is_built_in(name) and not any(rates & one for one in known):
                known.append(rates)
                check_builds(self.ranks, name, case)

    def _under_way(self) -> str:
        """Record the case that ran when ranks were lost: it may have killed them."""
        if self.running is None:
            return ""
        path = write(
            self.folder,
            "ranks-lost",
            CaseFile(
                implementation=self.running.implementation,
                case=self.running.case,
                status="crashed",
                judgement=None,
                environment=self.environment,
                title="ranks were lost while it ran",
                obligations=self.options.obligations,
            ),
        )
        named = f" --implementation {self.running.implementation}"
        return (
            "; the case under way can be run on one machine, which shows if it kills ranks: "
            f"zerocheck replay {path}{'' if is_built_in(self.running.implementation) else named}"
        )

    def _refusals(self, implementation: str, cases: Sequence[Case]) -> list[str | None]:
        """Return why cases are not run: the implementation refuses them, or is known to hang."""
        size = min(self.options.world_sizes)
        reasons = refusals(self.ranks, implementation, cases, world_size=size)
        return [
            reason or self.issue_matcher.hang(PlannedCase(implementation, case))
            for case, reason in zip(cases, reasons, strict=True)
        ]

    def _cases(self, planned: Sequence[PlannedCase]) -> None:
        """Judge each case while the ranks run the next one, unless that needs the memory."""
        waiting: tuple[int, Trial] | None = None
        number = 0
        while waiting is not None or number < len(planned) or self.plan.more():
            item = planned[number] if number < len(planned) else None
            result = None
            if waiting is not None:
                self.running = waiting[1]
                result = waiting[1].result()
                self.running = None
                if must_run_alone(waiting[1].case):
                    self._judge(waiting, result)
                    waiting = None
            upcoming: tuple[int, Trial] | None = None
            if (
                item is not None
                and self.hangs[item.implementation] >= HANGS
                and number not in self.issue_matcher.own
            ):
                self.left_out[item.implementation] += 1
            elif item is not None:
                upcoming = (
                    number,
                    Trial(
                        self.ranks,
                        item.implementation,
                        item.case,
                        obligations=self.options.obligations,
                        timed=self.timed.next(item),
                    ),
                )
            number += item is not None
            if waiting is not None and result is not None:
                self._judge(waiting, result)
            waiting = upcoming

    def _judge(self, run: tuple[int, Trial], result: Results) -> None:
        number, trial = run
        finished = self._marked(number, trial, trial.judged(result, words=True))
        if finished.pace is None:
            self.timed.failed(PlannedCase(trial.implementation, trial.case))
        bugs = self.findings.add(finished)
        try:
            finished = self.confirmer.confirm(
                finished, bugs, result.all, partial(self._marked, number, trial)
            )
        finally:  # also where that was interrupted
            self._finished(finished)
            for bug in bugs:
                self._write(bug)

    def _marked(self, number: int, trial: Trial, outcome: Outcome) -> CaseFinished:
        return self.issue_matcher.marked(outcome.record(number, trial.implementation, trial.case))

    def _finished(self, finished: CaseFinished) -> None:
        self.bus.handle(finished)
        self.drift_runs.note(finished)
        item = PlannedCase(finished.implementation, finished.case)
        if finished.judgement is not None or finished.status == "unsupported" or finished.known:
            self.plan.note(item, refused=finished.judgement is None, idle=idle(finished))
        if finished.status == "hung" and not finished.known:
            self.hangs[finished.implementation] += 1

    def _shrink(self) -> None:
        """Shrink the cases of findings at the end, when all cases are judged and causes known."""
        left = float(RUN_TRIES)
        launched = self.options.ranks == "torchrun"
        for bug in self.findings.bugs if self.options.shrink else ():
            # Ranks of a launcher cannot be restarted, so a case that breaks them is not shrunk.
            if bug.issue is not None or (launched and bug.violation is None):
                continue
            if not bug.confirmed or bug.merged is not None:
                continue
            if not worth(bug):
                bug.extent = "not searched for, since it does not show every time"
            elif left <= 0:
                bug.extent = f"not searched for, others took {RUN_TRIES} tries"
            else:
                left -= self._shrink_one(bug, min(Limits.tries, left))
            parted = None if bug.shrunk is None else bug.shrunk.parted
            others = [] if parted is None else self.findings.part(bug, parted)
            self._report(bug) if bug.shrunk is None else self._write(bug)
            for other in others:
                self._write(other)

    def _shrink_one(self, bug: Bug, tries: float) -> float:
        """Search for the smallest case of a bug; return the cost in tries."""
        name = bug.first.implementation
        limits = Limits(
            tries=tries,
            kept=(*self.fixed[name], *(["mesh"] if self.options.ranks == "torchrun" else [])),
            avoided=lambda case: self.issue_matcher.hang(PlannedCase(name, case)) is not None,
            listed=self.issue_matcher.listed,
        )
        right = self.findings.held(bug)
        bug.shrunk = shrink(bug, self.ranks, self.options.obligations, limits, right)
        if bug.shrunk is None:
            bug.extent = "not known, the smallest case does not show it in fresh rank processes"
            return tries
        return bug.shrunk.spent

    def _write(self, bug: Bug) -> None:
        """Write the bug's case file, in place of an earlier one, and the record of the finding."""
        if bug.case_file:
            Path(bug.case_file).unlink(missing_ok=True)
        if bug.merged is not None:
            bug.case_file = ""
            self._report(bug)
            return
        case_file = of_bug(bug, self.environment, self.options.obligations)
        bug.case_file = str(write(self.folder, bug.slug, case_file))
        self._report(bug)

    def _report(self, bug: Bug) -> None:
        finding = bug.finding(self.findings.bugs.index(bug))
        if self.reported.get(finding.number) != finding:
            self.reported[finding.number] = finding
            self.bus.handle(finding)

    def _drift(self) -> None:
        """Run some cases freely, next to the reference.

        Those of findings too, but not with ranks of a launcher, which cannot be restarted if one
        breaks them.
        """
        for drift in self.drift_runs.results():
            self.bus.handle(drift)
        if self.options.ranks == "processes":
            for drift in self.drift_runs.of_findings(self.findings.bugs):
                self.bus.handle(drift)

    def _stale(self, planned: Sequence[PlannedCase]) -> None:
        """Look for known issues that did not show, again and in fresh processes: some are rare."""
        for issue, number in self.issue_matcher.unseen():
            tries = 0
            while number is not None and tries < TRIES and not self.issue_matcher.shown(issue):
                case = planned[number].case
                trial = Trial(
                    self.ranks,
                    issue.implementation,
                    case,
                    fresh=True,
                    obligations=self.options.obligations,
                )
                again = self._marked(number, trial, trial.outcome(words=True))
                tries += 1
                if self.issue_matcher.shown(issue):
                    for bug in self.findings.add(again):
                        if bug.issue is None:
                            confirm(bug, self.ranks, self.options.obligations)
                        self._write(bug)
            if not self.issue_matcher.shown(issue):
                self.bus.handle(self.issue_matcher.stale(issue, tries))

    def _finish(self, outcome: Literal["done", "interrupted", "lost"], *more: str) -> int:
        for bug in self.findings.bugs:
            self._report(bug)
        tallied = tally(self.records)
        code = exit_code(tallied)
        if outcome == "interrupted":
            code = ExitCode.INTERRUPTED
        elif outcome == "lost" and not tallied.findings:
            code = ExitCode.BROKEN
        finished = RunFinished(
            outcome=outcome, exit_code=code, seconds=time.perf_counter() - self.started
        )
        reasons = why(tally([*self.records, finished]))
        reasons = (*reasons, *self._left_out(), *more)
        self.bus.handle(msgspec.structs.replace(finished, why=reasons))
        return code

    def _left_out(self) -> list[str]:
        return [
            f"{name}: {count} cases were left out after {HANGS} hangs"
            for name, count in self.left_out.items()
        ]


class _Collector:
    def __init__(self, take: Callable[[Record], None]) -> None:
        self._take = take

    def handle(self, record: Record) -> None:
        self._take(record)
