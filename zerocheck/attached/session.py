"""Session of an attached run: which steps are observed, and what is done with each."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial as bound
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..errors import UsageError
from ..foreign_text import one_line
from ..job_metrics.job_meter import JobMeter
from ..protocol.verdicts import Judgement, Obligation, Status, Violation
from .arrivals import Arrivals
from .options import AttachOptions, check_parts
from .record.axes import parts_of, whole_of
from .record.call_state import numbers_of
from .record.forwards import dotted
from .record.holdings import computes_on, words_for
from .record.optimizers import JobOptimizers
from .record.ranks import AllRanks, Alone, Problem, RankGroup, Stopped, attempt
from .record.step_record import Observed
from .recorded_steps import RecordedSteps
from .resume import Resume
from .same_model import check_same_model, pipeline_stages, schedule_divides
from .saves.loaded import JudgedLoad
from .saves.published import judge_export
from .saves.relations import Names
from .saves.saved_state import TrainedModel, has_record, record_weights
from .step_context import NOTHING, ObservedStep
from .summary import CheckedSteps
from .text import holds_line, say, stopped_text
from .verdict.exchange import Verdict, judge_step, with_norms
from .verdict.stages import with_stages
from .verdict.whole_samples import with_whole_samples
from .violated import WrongSteps
from .watching.used_gradients import UsedGradients
from .watching.watch import Watch

T = TypeVar("T")


class Attached:
    """Handle that `attach` returns.

    `taken`: number of the last step that began; `last`: verdict on the last checked one, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        options: AttachOptions,
        done: int = 0,
    ) -> None:
        self._options, self._axes = options, options.axes
        self._model, self._optimizers = model, JobOptimizers(())
        self._watch: Watch | None = None
        self._used = UsedGradients()
        self._observed_step = ObservedStep(self)
        self._compared = self._stopped = False
        self._recorded = RecordedSteps(options.recorder, options.directory, options.semantics)
        self._meter: JobMeter | None = None
        self._summary = CheckedSteps()
        self._wrong = WrongSteps(
            options.directory, options.semantics, options.on_violation, self._summary
        )
        self._numbers = None if options.reference is None else numbers_of(model, dotted)
        self._done = self._checked = done
        self._due = options.resume_from
        self.taken = done
        self.last: Judgement | None = None
        self._arrivals: Arrivals | None = None
        self._with_ranks(bound(self._take, optimizer))
        self._next = self._after(done)
        self._resume = Resume(TrainedModel(model, self._optimizers, self._axes.parts))
        if dist.is_available() and dist.is_initialized():
            self._compare()
            self._with_ranks(self._open_meter)
        self._first = self._ranks().rank == 0
        atexit.register(_finish, weakref.ref(self))

    def _take(self, optimizer: Any, ranks: AllRanks) -> None:
        """Take what is checked. Raises UsageError for what cannot be judged."""
        self._optimizers = JobOptimizers(optimizer)
        check_parts(self._model, self._optimizers)
        numbers = pipeline_stages(self._model)
        parts = parts_of(self._model, self._axes, self._options.reference, ranks, numbers)
        whole = whole_of(self._model, self._axes, self._options.reference)
        self._axes = replace(self._axes, parts=parts, whole=whole)

    @property
    def wrong(self) -> int:
        """Number of wrong steps and loads, and of times that samples came again."""
        return self._summary.all_wrong

    @property
    def summary(self) -> str:
        """Few lines on the steps so far, which rank 0 prints when the process ends."""
        lines = [] if self._meter is None else self._meter.lines()
        return "\n".join([self._summary.text(self.taken - self._done), *lines])

    def step(self) -> AbstractContextManager[None]:
        """Return the context for one update; unless it is observed, it costs a comparison."""
        self._count()
        return self._observed_step if self._observes else NOTHING

    def before(self) -> None:
        """Begin a step, where a `with` does not fit; `after` ends it."""
        self._count()
        if self._observes:
            self.begin()

    def _count(self) -> None:
        if self._due is not None:  # the script has not said that it loaded
            self.loaded(self._due)
        self.taken += 1
        self._resume.write_waiting()
        if self._resume.compares_next_step:
            violation = self._with_ranks(bound(self._resume.next_step, self.taken))
            self._summary.wrong_loads += violation is not None
            self._handle_violation(violation)

    def after(self) -> None:
        """End a step that began with `before`."""
        self.end()

    def saved(self, directory: str | Path, *, data: Any = None) -> None:
        """Record what the script just saved, for `loaded`. Every rank calls this.

        The record, zerocheck.json in the folder, or in NAME.zerocheck beside a file, has digests of
        all tensors, which do not depend on the sharding, step counts, options and random states.
        data: the position in the data, as plain data. If the folder or file does not exist yet, as
        with an asynchronous save, the record is written when a later step begins. If it cannot be
        written, that is printed, and training goes on.
        """
        folder = Path(directory)
        save = bound(self._resume.save, folder, step=self.taken, data=data)
        self._handle_samples(self._with_ranks(save))

    def published(self, directory: str | Path) -> None:
        """Record the weights in a folder, for `zerocheck.compare_weights`. Every rank calls this.

        Parameters and buffers alone, as they are now. Creates the folder if it is missing.
        """
        weights = TrainedModel(self._model, JobOptimizers(()), self._axes.parts)
        self._with_ranks(bound(record_weights, Path(directory), weights, step=self.taken))

    def exported(
        self, directory: str | Path, *, names: Names | None = None, partial: bool = False
    ) -> None:
        """Judge that the weights in the files are those of the model. Every rank calls this.

        names, partial: as in `zerocheck.compare_weights`. Raises Violated if they are not, with
        on_violation="raise", and UsageError for unknown names in training.
        """
        named: dict[str, Any] = {"step": self.taken, "names": names or {}, "partial": partial}
        weights = TrainedModel(self._model, JobOptimizers(()), self._axes.parts)
        judge = bound(judge_export, Path(directory), weights, **named)
        self._handle_load(self._with_ranks(judge), directory)

    def epoch(self, number: int, *, data_ranks: int | None = None) -> None:
        """Follow the samples of this epoch: each may come once, over all ranks and resumes.

        Every rank calls this where an epoch begins, or goes on after a resume. Inputs of the model
        in training are hashed from then on, and judged on checked steps and by `saved`; not for
        samplers that draw with replacement. data_ranks: how many ranks have samples of their own,
        where neighbours share them (tensor parallelism). Raises UsageError for wrong numbers.
        """
        self._resume.epoch(number, data_ranks, lambda: self.taken, self._ranks())

    def _handle_samples(self, violation: Violation | None) -> None:
        """Print samples that came again, and raise if that is wanted."""
        self._summary.wrong_samples += violation is not None
        self._handle_violation(violation)

    def _handle_violation(self, violation: Violation | None) -> None:
        if violation is not None:
            statuses: dict[Obligation, Status] = {violation.obligation: "violated"}
            judgement = Judgement(statuses=statuses, violations=(violation,))
            self._handle(judgement, f"step {violation.step}", violation.step)

    def _handle(self, judgement: Judgement, place: str, number: int) -> None:
        what = words_for(self._model, self._optimizers)
        self._wrong.handle_without_bundle(what, place, number, judgement, self._ranks())

    def loaded(
        self,
        directory: str | Path,
        *,
        data: Any = None,
        random: bool = False,
        options: bool = True,
        required: bool = True,
    ) -> None:
        """Judge that what the script just loaded is what was saved. Every rank calls this.

        On any number of ranks: parameters, optimizer states, step counts, options and buffers; with
        `data` the position in the data, and with `random` the random states of as many ranks. When
        the next step begins, options of parameter groups, which a scheduler sets, are compared with
        those that the job that saved had then; options=False compares none. Steps are counted on,
        and the next is checked. Raises Violated if it is not, with
        on_violation="raise", and UsageError for a folder without a record, if it is required.
        """
        self._due = None
        judge = bound(self._resume.load, Path(directory), required=required)
        load = self._with_ranks(bound(judge, data=data, random=random, options=options))
        if load is None:
            return
        self._done += load.step - self.taken
        self.taken = self._checked = load.step
        self._next = self.taken + 1
        self._handle_load(load, directory)

    def _handle_load(self, load: JudgedLoad | None, directory: str | Path) -> None:
        """Count a load or an export, and print what is wrong with it."""
        if load is None:
            return
        self._summary.add_load(load.judgement)
        if load.judgement.violations:
            self._handle(load.judgement, str(directory), load.step)
        elif self._ranks().rank == 0 and self._options.verbose:
            say(one_line(load.text))

    @contextmanager
    def saving(self, directory: str | Path, *, data: Any = None) -> Iterator[None]:
        """Take the time of the save in this block, and call `saved` after it."""
        with self.timed("save", directory):
            yield
            self.saved(directory, data=data)

    @contextmanager
    def loading(self, directory: str | Path, **named: Any) -> Iterator[None]:
        """Take the time of the load in this block, and call `loaded` after it. named: for it."""
        with self.timed("load", directory):
            yield
        self.loaded(directory, **named)

    def timed(self, what: str, directory: str | Path) -> AbstractContextManager[None]:
        """Take the time of a "save" or a "load", for `metrics`, and do no more."""
        if self._meter is None:
            return NOTHING
        replaced = what == "save" and has_record(Path(directory))
        return self._meter.checkpoint(what, Path(directory), replaced=replaced)

    def _with_ranks(self, work: Callable[[AllRanks], T]) -> T | None:
        """Do work with all ranks; None where the checks are stopped, or stop by it.

        Raises UsageError, on all ranks, for what the user can help, unless that is a warning.
        """
        ranks = self._ranks()
        if self._stopped:
            return None
        try:
            return attempt(ranks, lambda: work(ranks))
        except Stopped as stopped:
            if not stopped.problem.place and self._options.on_unsupported == "raise":
                raise UsageError(stopped.problem.text) from None
            self._stop(stopped.problem, ranks)
            return None

    @property
    def _observes(self) -> bool:
        return self._watches or self._options.metrics is not None

    @property
    def _watches(self) -> bool:
        return self.taken == self._next or self._recorded.wanted

    def _after(self, number: int) -> int:
        return -1 if self._stopped else self._options.after(number)

    def _compare(self) -> None:
        if self._stopped:
            return
        self._compared = True
        ranks = self._ranks()
        try:
            attempt(ranks, lambda: check_same_model(self._model, self._axes.stage, ranks))
        except Stopped as stopped:
            self._stop(stopped.problem, ranks)

    def _stop(self, problem: Problem, ranks: AllRanks) -> None:
        """Check no further step; every rank does so at the same step."""
        self._stopped = True
        self._next = -1
        self._recorded.stop()
        text = self._summary.stopped = stopped_text(self.taken, problem)
        if ranks.rank in (0, problem.rank):
            say(text)

    def begin(self) -> None:
        """Begin the observation of the step whose number is `taken`."""
        if self._watches:
            self._watch_step()
        if self._options.metrics is not None and self._meter is None:
            self._with_ranks(self._open_meter)
        if self._meter is not None:
            self._meter.begin(self.taken, observed=self._watch is not None)

    def _watch_step(self) -> None:
        self._started = time.perf_counter()
        if self._watch is not None:  # the step before was left without `after`
            self.abandon()
        if not self._compared:
            self._compare()
        if self._stopped:
            return
        ranks = self._ranks()
        if self._arrivals is None:
            self._arrivals = Arrivals(self._options.group)
            self._recorded.open(ranks)
        self._arrivals.begin(self.taken, ranks.rank)
        self._watch = Watch(
            self._model,
            self._optimizers,
            rank=ranks.rank,
            world_size=ranks.size,
            number=self.taken,
            used=self._used,
            axes=self._axes,
            listens=self._numbers,
            divides=schedule_divides(self._model),
        )
        self._watch.start()
        self._copied = time.perf_counter() - self._started

    def _open_meter(self, ranks: AllRanks) -> None:
        if self._options.metrics is not None:
            self._meter = JobMeter(
                self._model,
                self._optimizers,
                self._options.metrics,
                self._options.group,
                rank=ranks.rank,
                world_size=ranks.size,
                computes_on=computes_on(self._model),
                done=self._done,
                say=say,
            )

    def abandon(self, error: BaseException | None = None) -> None:
        """Leave a step without judging it, as where the script raised an exception in it."""
        if self._meter is not None:
            self._meter.abandon(error)
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        if self.taken != self._next:
            return
        self._next = self._after(self.taken)
        if watch is not None and self._arrivals is not None:
            with suppress(RuntimeError):  # the store is gone, and with it the other ranks
                self._arrivals.leave(watch.number)

    def end(self) -> None:
        """End the observation: judge the step, or record it."""
        if self._meter is not None:
            self._meter.end()
        watch, self._watch = self._watch, None
        if watch is None:
            return
        if self.taken != self._next:
            self._recorded.keep(watch)
            return
        started = time.perf_counter()
        self._next = self._after(self.taken)
        ranks = self._ranks()
        try:
            if self._arrivals is None or not self._arrivals.arrive(watch.number, ranks):
                for rank in self._arrivals.silent if self._arrivals is not None else ():
                    say(f"zerocheck: step {watch.number} is not checked: rank {rank} is silent")
                return
            observed, verdict = attempt(ranks, lambda: self._judge(watch.observed(), ranks))
        except Stopped as stopped:
            self._stop(stopped.problem, ranks)
            return
        except RuntimeError as error:
            problem = Problem(ranks.rank, f"the store of the process group failed: {error}")
            self._stop(problem, ranks)
            return
        finally:
            watch.stop()
        # A step without an update says little: the next one is checked too.
        if not verdict.updated:
            self._next = self.taken + 1
        self.last = verdict.judgement
        self._summary.add(self.last, alike=verdict.alike)
        seconds = self._copied + time.perf_counter() - started
        if self._meter is not None:
            self._meter.note_check(self.last, seconds)
        before, self._checked = self._checked, self.taken
        if self.last.violations:
            self._wrong.handle(
                observed,
                self.last,
                ranks,
                before=before,
                records=self._options.recorder is not None,
                recorder=self._recorded.recorder,
                judge=lambda one: self._judge(one, ranks),
            )
        elif ranks.rank == 0 and self._options.verbose:
            say(holds_line(self.taken, self.last, seconds))
        self._recorded.forget()
        if self._resume.follows_samples:
            self._handle_samples(self._with_ranks(self._resume.judge_samples))
        if self._resume.wants_next_step:
            self._next = self.taken + 1

    def _judge(self, observed: Observed, ranks: AllRanks) -> tuple[Observed, Verdict]:
        observed = with_norms(observed, ranks)
        reference = self._options.reference
        if reference is not None:
            observed = with_stages(observed, self._axes.of("layers"), ranks)
            observed = with_whole_samples(observed, self._axes, ranks)
        verdict = judge_step(
            observed, ranks, reference=reference, semantics=self._options.semantics
        )
        return observed, verdict

    def _ranks(self) -> AllRanks:
        if not (dist.is_available() and dist.is_initialized()):
            return Alone()
        return RankGroup(self._options.group, computes_on(self._model))


def _finish(attached: weakref.ref[Attached]) -> None:
    """Print the summary of a run whose handle still exists, unless nothing was checked."""
    found = attached()
    if found is None:
        return
    if found._meter is not None:
        found._meter.close()
    summary = found._summary
    found._resume.write_last()
    any_checked = summary.checked or summary.loads or summary.exports or found._meter is not None
    if any_checked and found._first:
        say(found.summary)
