"""Engine: plans cases, runs and judges them, and sends records to its handlers."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from ..case.schema import Case
from ..catalogue import is_built_in
from ..errors import ExitCode, RanksLost, UsageError
from ..judge.local import as_on_a_rank
from ..machine import signals
from ..machine.devices import CPU
from ..models.user import forget_factories
from ..protocol.verdicts import RESUME
from ..ranks.limits import check_world_size
from ..ranks.torchrun import TorchrunPool
from .execute.environment import environment
from .execute.host_memory import check as check_room
from .execute.host_memory import must_run_alone
from .execute.launch import with_ranks_of
from .execute.outcome import Results
from .execute.rank_pool import RankPool
from .execute.rank_requests import check_builds, describe, refusals
from .execute.reused import ReusedOutcomes, ReusedTrial
from .execute.trial import Trial
from .execute.user_model import with_models
from .execute.user_optimizer import with_optimizers
from .findings.bug import Bug
from .findings.confirmation import TRIES, confirm
from .findings.crash_watch import CrashWatch, simplest_crash
from .findings.findings import Findings
from .findings.issue_matcher import KnownIssueMatcher
from .findings.recorder import FindingRecorder
from .findings.shrink import RUN_TRIES, Limits, paths, shrink, worth
from .findings.suspicion import Confirmer
from .known_issues.releases import Releases
from .plan.options import RunOptions
from .plan.plan import Plan, PlannedCase
from .records.exercised import idle
from .records.journal import Bus, Handler
from .records.records import CaseFinished, Outcome, Record, RunFinished, RunStarted
from .records.tally import exit_code, tally, why

AHEAD = 4
"""Cases that ranks on CPUs have at once, at most, while an earlier one is judged; on a GPU, which
they share, it is one. It is the same on every machine, since what comes of a case may leave out a
later one."""
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
        self.running: PlannedCase | None = None
        self.submitted = 0
        """Cases of the plan that were, or were left out."""
        self.hangs: Counter[str] = Counter()
        self.crash_watch = CrashWatch()
        self.stopped: dict[str, Bug] = {}
        """Implementations that crash alike in every case, and the bug."""
        self.left_out: Counter[str] = Counter()
        self.mine: frozenset[int] | None = None
        """Numbers in the plan of the cases that a shard takes; None for a whole run."""

    def run(self) -> int:
        options = self.options
        forget_factories()
        if options.ranks == "processes":
            check_world_size(max(options.world_sizes))  # before anything is run
        with as_on_a_rank():
            pass  # torch imports a lot the first time; the ranks are importing meanwhile
        described = {}
        for name in options.implementations:
            self.bus.begins(f"loading {name}")
            described[name] = describe(self.ranks, name, world_size=min(options.world_sizes))
        described, without = with_models(self.ranks, described, options)
        size = min(options.world_sizes)
        described = with_optimizers(self.ranks, described, options.optimizer, world_size=size)
        if without:
            options = self.options = options.leaving_out(without)
            self.issue_matcher = KnownIssueMatcher(options, Releases.of(self.environment))
            self.findings = Findings(self.issue_matcher.issue_of)
        self.reused = ReusedOutcomes(options, self.environment)
        self.confirmer = Confirmer(self.findings, self.ranks, options.obligations)
        self.recorder = FindingRecorder(
            self.findings,
            self.environment,
            options.obligations,
            Path(options.report_dir) / "findings",
            self.bus.handle,
            self.issue_matcher.similar,
        )
        self.fixed = {name: paths(described[name].fixed) for name in described}
        self.bus.begins("drawing cases")
        self.plan = Plan(options, described, self._refusals)
        self.plan.cases, left_out = self.issue_matcher.arrange(self.plan.cases)
        cases = self.plan.cases
        if options.shard is not None:
            self.mine = options.shard.of([planned.case for planned in cases])
            cases = [planned for number, planned in enumerate(cases) if number in self.mine]
        left = [one for one in cases if self.reused.of(one.implementation, one.case) is None]
        check_room(planned.case for planned in left)
        self._check_builds()
        self.started = time.perf_counter()
        started = RunStarted(
            environment=self.environment,
            implementations=options.implementations,
            obligations=options.obligations,
            profile=options.profile,
            seed=options.seed,
            world_sizes=options.world_sizes,
            planned=len(cases),
            started=time.time(),
            shard=str(options.shard or ""),
            reused=len(cases) - len(left),
            missing_shards=self.reused.missing,
            sources=self.reused.sources,
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
            if self.mine is None:  # else the run that takes all shards together does it
                self._stale(self.plan.cases)
                self._shrink()
            signals.ignore()
        except KeyboardInterrupt:
            signals.ignore()
            self._finish("interrupted")
            raise
        except RanksLost as lost:
            signals.ignore()
            return self._finish("lost", f"{lost}{self.recorder.lost(self.running)}")
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
                self.bus.begins(f"building {name} on {case.world_size} ranks")
                check_builds(self.ranks, name, case)

    def _refusals(self, implementation: str, cases: Sequence[Case]) -> list[str | None]:
        """Return why cases are not run: the implementation refuses them, or is known to hang."""
        size = min(self.options.world_sizes)
        reasons = refusals(self.ranks, implementation, cases, world_size=size)
        return [
            reason or self.issue_matcher.hang(PlannedCase(implementation, case))
            for case, reason in zip(cases, reasons, strict=True)
        ]

    def _cases(self, planned: Sequence[PlannedCase]) -> None:
        """Judge each case, in their order, while the ranks run the next ones.

        Ranks of other world sizes run theirs at the same time, and one that hangs or is waited for
        holds up no others.
        """
        under_way: deque[tuple[int, Trial | ReusedTrial]] = deque()
        while True:
            self._submit_ahead(planned, under_way)
            if not under_way:
                if self.submitted < len(planned) or self._more():
                    continue
                return
            run = under_way.popleft()
            self.running = PlannedCase(run[1].implementation, run[1].case)
            result = run[1].result()
            self.running = None
            if not must_run_alone(run[1].case):
                self._submit_ahead(planned, under_way)
            self._judge(run, result)

    def _submit_ahead(
        self, planned: Sequence[PlannedCase], under_way: deque[tuple[int, Trial | ReusedTrial]]
    ) -> None:
        """Submit cases until there are enough under way."""
        most = AHEAD if self.options.device == CPU else 1
        while self.submitted < len(planned) and len(under_way) < most:
            number, item = self.submitted, planned[self.submitted]
            if under_way and (not under_way[-1][1].single or must_run_alone(item.case)):
                return
            self.submitted += 1
            trial = self._trial(number, item)
            if trial is not None:
                under_way.append((number, trial))

    def _more(self) -> bool:
        """Return True if the plan has grown. A shard takes no more than its part of the plan."""
        return self.mine is None and self.plan.more()

    def _trial(self, number: int, item: PlannedCase) -> Trial | ReusedTrial | None:
        """Start a case, or take it from another run; None if it is another shard's or left out."""
        name, case = item.implementation, item.case
        if self.mine is not None and number not in self.mine:
            return None
        ended = name in self.stopped or self.hangs[name] >= HANGS
        if ended and number not in self.issue_matcher.own:
            self.left_out[name] += 1
            return None
        outcome = self.reused.of(name, case)
        if outcome is not None:
            return ReusedTrial(name, case, outcome)
        obligations = self.options.obligations
        return Trial(self.ranks, name, case, obligations=obligations)

    def _judge(self, run: tuple[int, Trial | ReusedTrial], result: Results) -> None:
        number, trial = run
        finished = self._marked(number, trial, trial.judged(result, words=True))
        bugs = self.findings.add(finished)
        try:
            finished = self.confirmer.confirm(
                finished, bugs, result.all, partial(self._marked, number, trial)
            )
        finally:  # also where that was interrupted
            self._finished(finished)
            for bug in bugs:
                self.recorder.write(bug)
        if self.crash_watch.add(finished):
            self._stop(finished.implementation)

    def _stop(self, name: str) -> None:
        """Leave out the other cases of an implementation whose simplest case crashes alike too."""
        bug = self.findings.of_last[0]
        if not bug.confirmed:
            return
        bug.shrunk = simplest_crash(bug, self.ranks, self.options.obligations, self.fixed[name])
        if bug.shrunk is not None:
            self.stopped[name] = bug
            self.recorder.write(bug)

    def _marked(self, number: int, trial: Trial | ReusedTrial, outcome: Outcome) -> CaseFinished:
        return self.issue_matcher.marked(outcome.record(number, trial.implementation, trial.case))

    def _finished(self, finished: CaseFinished) -> None:
        self.bus.handle(finished)
        item = PlannedCase(finished.implementation, finished.case)
        if finished.judgement is not None or finished.status == "unsupported" or finished.known:
            self.plan.note(item, refused=finished.judgement is None, idle=idle(finished))
        if finished.status == "hung" and not finished.known:
            self.hangs[finished.implementation] += 1

    def _shrink(self) -> None:
        """Shrink the cases of findings at the end, when all cases are judged and causes known."""
        left = float(RUN_TRIES)
        launched = self.options.ranks == "torchrun"
        if self.options.shrink and self.findings.bugs:
            self.bus.begins("shrinking findings, which takes 1 to 2 min")
        for bug in self.findings.bugs if self.options.shrink else ():
            # Ranks of a launcher cannot be restarted, so a case that breaks them is not shrunk.
            if bug.issue is not None or (launched and bug.violation is None):
                continue
            if not bug.confirmed or bug.merged is not None:
                continue
            if self.stopped.get(bug.implementation) is bug:
                continue
            if not worth(bug):
                bug.extent = "not searched for, since it does not show every time"
            elif left <= 0:
                bug.extent = f"not searched for, others took {RUN_TRIES} tries"
            else:
                left -= self._shrink_one(bug, min(Limits.tries, left))
            parted = None if bug.shrunk is None else bug.shrunk.parted
            others = [] if parted is None else self.findings.part(bug, parted)
            self.recorder.report(bug) if bug.shrunk is None else self.recorder.write(bug)
            for other in others:
                self.recorder.write(other)

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
                        self.recorder.write(bug)
            if not self.issue_matcher.shown(issue):
                self.bus.handle(self.issue_matcher.stale(issue, tries))

    def _finish(self, outcome: Literal["done", "interrupted", "lost"], *more: str) -> int:
        for name, bug in self.stopped.items():
            bug.left_out = self.left_out.pop(name, 0)
        for bug in self.findings.bugs:
            self.recorder.report(bug)
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
