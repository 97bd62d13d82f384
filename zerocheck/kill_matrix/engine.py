"""Kill matrix: every planted fault, hunted with the cases that a run of it would have."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Literal, Protocol

from msgspec.structs import replace

from ..case.features import COMPILED, OF_AXIS, OF_PRECISION
from ..case.mesh import INNER
from ..errors import ExitCode
from ..faults.fault import Fault
from ..judge.diagnose.named import without_names
from ..judge.local import as_on_a_rank
from ..machine import signals
from ..protocol.replies import Description
from ..run.execute.environment import environment
from ..run.execute.outcome import Results, judged
from ..run.execute.rank_pool import RankPool
from ..run.execute.rank_requests import describe, refusals
from ..run.findings.shrink import Limits, paths, shrink
from ..run.plan.plan import Plan, SharedDraws
from ..run.records.matrix_records import FaultsFinished, FaultShrunk, FaultsStarted, MatrixRecord
from ..run.records.matrix_summary import Summary
from .hunt import Hunt, TrialAnswer
from .options import MatrixOptions
from .scheduler import TrialRequest, run_searches


class MatrixHandler(Protocol):
    """Receiver of each record of the matrix, in order."""

    def handle(self, record: MatrixRecord) -> None:
        """Take one record. An exception from here ends the matrix."""


def run(options: MatrixOptions, handlers: Sequence[MatrixHandler], *, ranks: RankPool) -> int:
    """Hunt all faults; return the exit code (0 all are caught, 1 one escaped).

    ranks: rank processes, which are left open. Raises UsageError for an implementation that cannot
    be loaded. On KeyboardInterrupt the journal is finished first; then it is raised again.
    """
    return _Matrix(options, handlers, ranks).run()


class _Matrix:
    def __init__(
        self, options: MatrixOptions, handlers: Iterable[MatrixHandler], ranks: RankPool
    ) -> None:
        self.options = options
        self.handlers = tuple(handlers)
        self.ranks = ranks
        self.drawn = SharedDraws()
        self.described: Callable[[str], Description] = cache(partial(describe, ranks))
        self.open: list[Hunt] = []
        self.caught: list[Hunt] = []
        self.records: list[MatrixRecord] = []

    def run(self) -> int:
        options = self.options
        with as_on_a_rank():
            pass  # torch imports a lot the first time; the ranks are importing meanwhile
        if options.implementation is not None:
            self.described(options.implementation)  # before anything is printed
        started = time.perf_counter()
        asked = options.run(options.faults[0])
        self._report(
            FaultsStarted(
                environment=environment(options.device),
                faults=tuple(fault.name for fault in options.faults),
                profile=options.profile,
                seed=options.seed,
                world_sizes=asked.world_sizes,
                obligations=options.obligations,
                started=time.time(),
                implementation=options.implementation or "",
                max_cases=options.max_cases,
            )
        )
        try:
            run_searches(self.ranks, (hunt.search() for hunt in self._hunts()), self._answer)
            # In the order of the catalogue, whichever was caught first.
            self.caught.sort(key=lambda hunt: options.faults.index(hunt.fault))
            for hunt in self.caught if options.shrink else ():
                self._shrink(hunt)
            signals.ignore()
        except KeyboardInterrupt:
            signals.ignore()
            for hunt in self.open:
                if hunt.row.caught:  # what is known of the others is nothing
                    self._report(hunt.row)
            self._finish("interrupted", started)
            raise
        return self._finish("done", started)

    def _hunts(self) -> Iterable[Hunt]:
        for fault in self.options.faults:
            hunt = Hunt(
                fault,
                plan=partial(self._plan, fault),
                fixed=partial(self._fixed, fault.where),
                done=self._done,
            )
            self.open.append(hunt)
            yield hunt

    def _plan(self, fault: Fault) -> Plan:
        ask = partial(refusals, self.ranks)
        where = fault.where
        described = self.described(where)
        rare = (
            (OF_PRECISION, "capabilities", "precision"),
            (COMPILED, "capabilities", "compile"),
            *(({*OF_AXIS[axis]}, "axes", axis) for axis in INNER),
        )
        for names, field, declared in rare:
            # Few faults are written for that.
            if names.isdisjoint(fault.features):
                others = tuple(one for one in getattr(described, field) if one != declared)
                described = replace(described, **{field: others})
        return Plan(self.options.run(fault), {where: described}, ask, self.drawn)

    def _fixed(self, where: str) -> dict[str, object]:
        return dict(self.described(where).fixed)

    def _answer(self, ask: TrialRequest, results: Results) -> TrialAnswer:
        began = time.perf_counter()
        with without_names() if self.options.without_names else nullcontext():
            outcome = judged(ask.case, results, obligations=self.options.obligations)
        return TrialAnswer(outcome, judging=time.perf_counter() - began)

    def _done(self, hunt: Hunt) -> None:
        self.open.remove(hunt)
        if hunt.row.caught:
            self.caught.append(hunt)
        self._report(hunt.row)

    def _shrink(self, hunt: Hunt) -> None:
        """Find the smallest case. A fault that shows sometimes is left as it is: see `shrink`."""
        bug, fault = hunt.bug, hunt.fault
        if bug is None or fault.sometimes < 1.0:
            return
        began = time.perf_counter()
        kept = paths(self._fixed(fault.where))
        found = shrink(bug, self.ranks, self.options.run(fault).obligations, Limits(kept=kept))
        record = FaultShrunk(fault=fault.name, seconds=time.perf_counter() - began)
        if found is not None:
            record = replace(
                record,
                case=found.finished.case,
                size=found.size,
                extent=found.extent,
                tries=found.tries,
            )
        self._report(record)

    def _finish(self, outcome: Literal["done", "interrupted"], started: float) -> int:
        seconds = time.perf_counter() - started
        finished = FaultsFinished(outcome=outcome, exit_code=ExitCode.INTERRUPTED, seconds=seconds)
        code = Summary((*self.records, finished)).exit_code
        self._report(replace(finished, exit_code=code))
        return code

    def _report(self, record: MatrixRecord) -> None:
        self.records.append(record)
        for handler in self.handlers:
            handler.handle(record)
