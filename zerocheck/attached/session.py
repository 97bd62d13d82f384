"""`zerocheck.attach`: checks of chosen steps of a running training script."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..contract.semantics import Semantics
from ..errors import UsageError
from ..foreign_text import one_line
from ..protocol.verdicts import Judgement, Violation
from .arrivals import Arrivals
from .exchange import Verdict, judge_step, with_norms
from .holdings import computes_on, words_for
from .optimizers import observed_optimizer
from .options import AttachOptions, check_parts
from .ranks import AllRanks, Alone, Problem, RankGroup, Stopped, attempt
from .recorder import FlightRecorder, open_recorder
from .reference import Factory
from .resume import Resume
from .same_model import IN_PIPELINE, check_same_model, pipeline_stages
from .step_context import NOTHING, ObservedStep
from .step_record import Observed
from .summary import CheckedSteps
from .text import holds_line, say, stopped_text
from .violated import OnViolation, WrongSteps
from .watch import Watch

T = TypeVar("T")


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    reference: Factory | None = None,
    semantics: Semantics | None = None,
    steps: Iterable[int] = (1, 2, 3),
    every: int | None = 1000,
    directory: str | Path = "zerocheck-attach",
    on_violation: OnViolation = "raise",
    done: int = 0,
    group: dist.ProcessGroup | None = None,
    recorder: str | int | None = None,
    verbose: bool = False,
) -> Attached:
    """Check chosen steps of a training run that uses `model` and `optimizer` as always.

        check = zerocheck.attach(model, optimizer)
        for x, y in loader:
            with check.step():
                loss_fn(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    Every rank calls this, after wrapping, with the optimizer. The block is around all that belongs
    to one update: all microbatches, clipping, `optimizer.step()`.

    model         as it is called in training: of DDP, FSDP1, FSDP2, torch.compile, or plain
    optimizer     torch.optim.AdamW or SGD, or a subclass, also within ZeroRedundancyOptimizer or a
                  wrapper such as that of Accelerate; `optimizer.step(closure)` is supported
    reference     function without arguments that makes the model before it is wrapped. With it
                  gradients are judged too: each rank calls that model with what `model` was called
                  with, and gives its outputs the gradients that came from outside. Not where a
                  loss reaches parameters past the outputs: the summary says so
    semantics     how gradients of ranks become one (`average`, `unused`); default: their mean;
                  weight="token": the loss is the mean over all tokens of the step, which is judged
    steps         numbers of steps to check; the first after `attach` is 1
    every         check each step whose number is a multiple of it, too; None: no others
    directory     where a violated step is written, for `zerocheck replay`
    on_violation  "raise": Violated, on all ranks; "warn": printed once, and training goes on;
                  `check.wrong` counts the wrong steps, for an exit code of your choice
    done          steps taken before, for a run that is resumed: its first step is done + 1
    group         the ranks that train this model; default: all. In a pipeline: those of one stage
    recorder      bytes of disk for each rank, such as "2GiB": the steps between the checked ones
                  are kept there, and where a checked step is wrong, the first wrong one is found
    verbose       print a line for each step in which all holds; a summary is printed at the end

    On a checked step each rank copies its shards to the CPU, before and after, and the gradient:
    seven times the bytes of its parameters. On other steps one integer is compared, and nothing is
    hooked; with `recorder` they are copied, too, to disk.

    Raises UsageError for what cannot be judged. After that only a violation ends the training, with
    on_violation="raise": where zerocheck fails, it prints why, and checks no further step.
    """
    options = AttachOptions.checked(
        reference=reference,
        semantics=semantics,
        steps=steps,
        every=every,
        directory=directory,
        on_violation=on_violation,
        group=group,
        recorder=recorder,
        verbose=verbose,
    )
    return Attached(model, optimizer, options, done)


class Attached:
    """Handle that `attach` returns.

    `taken`: number of the last step that began; `last`: verdict on the last checked one, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        options: AttachOptions,
        done: int = 0,
    ) -> None:
        self._options = options
        self._model, self._optimizer = model, observed_optimizer(optimizer)
        self._watch: Watch | None = None
        self._observed_step = ObservedStep(self)
        self._compared = self._stopped = self._in_pipeline = False
        self._record_bytes = options.recorder
        self._recorder: FlightRecorder | None = None
        self._summary = CheckedSteps()
        self._wrong = WrongSteps(
            options.directory, options.semantics, options.on_violation, self._summary
        )
        self._resume = Resume(model, self._optimizer)
        self._done = self._right = done
        self.taken = done
        self.last: Judgement | None = None
        self._next = self._after(done)
        self._arrivals: Arrivals | None = None
        self._with_ranks(lambda _: check_parts(self._model, self._optimizer))
        if dist.is_available() and dist.is_initialized():
            self._compare()
        if self._ranks().rank == 0:
            atexit.register(_print_summary, weakref.ref(self))

    @property
    def wrong(self) -> int:
        """Number of wrong steps and loads, and of times that samples came again."""
        return self._summary.all_wrong

    @property
    def summary(self) -> str:
        """Few lines on the steps so far, which rank 0 prints when the process ends."""
        return self._summary.text(self.taken - self._done)

    def step(self) -> AbstractContextManager[None]:
        """Return the context for one update; unless it is observed, it costs a comparison."""
        self.taken += 1
        return self._observed_step if self._observes else NOTHING

    def before(self) -> None:
        """Begin a step, where a `with` does not fit; `after` ends it."""
        self.taken += 1
        if self._observes:
            self.begin()

    def after(self) -> None:
        """End a step that began with `before`."""
        self.end()

    def saved(self, directory: str | Path, *, data: Any = None) -> None:
        """Record what the script just saved in this folder, for `loaded`. Every rank calls this.

        The record, zerocheck.json, has digests of all tensors, which do not depend on the sharding,
        step counts, options and random states. data: the position in the data, as plain data.
        Where it cannot be written, that is printed, and training goes on.
        """
        folder = Path(directory)
        save = partial(self._resume.save, folder, step=self.taken, data=data)
        self._handle_samples(self._with_ranks(save))

    def epoch(self, number: int, *, data_ranks: int | None = None) -> None:
        """Follow the samples of this epoch: each may come once, over all ranks and resumes.

        Every rank calls this where an epoch begins, or goes on after a resume. Inputs of the model
        in training are hashed from then on, and judged on checked steps and by `saved`; not for
        samplers that draw with replacement. data_ranks: how many ranks have samples of their own,
        where neighbours share them (tensor parallelism). Raises UsageError for wrong numbers.
        """
        self._resume.epoch(number, data_ranks, lambda: self.taken, self._ranks())

    def _handle_samples(self, found: Violation | None) -> None:
        """Print samples that came again, and raise if that is wanted."""
        if found is not None:
            judgement = Judgement(statuses={found.obligation: "violated"}, violations=(found,))
            self._summary.wrong_samples += 1
            self._handle(judgement, f"step {found.step}", found.step)

    def _handle(self, judgement: Judgement, place: str, number: int) -> None:
        what = words_for(self._model, self._optimizer)
        self._wrong.handle_without_bundle(what, place, number, judgement, self._ranks())

    def loaded(
        self,
        directory: str | Path,
        *,
        data: Any = None,
        random: bool = False,
        required: bool = True,
    ) -> None:
        """Judge that what the script just loaded is what was saved. Every rank calls this.

        On any number of ranks: parameters, optimizer states, step counts, options and buffers; with
        `data` the position in the data, and with `random` the random states of as many ranks. Steps
        are counted on, and the next is checked. Raises Violated if it is not, with
        on_violation="raise", and UsageError for a folder without a record, if it is required.
        """
        judge = partial(self._resume.load, Path(directory), required=required)
        load = self._with_ranks(partial(judge, data=data, random=random))
        if load is None:
            return
        self._done += load.step - self.taken
        self.taken = self._right = load.step
        self._next = self.taken + 1
        self._summary.add_load(load.judgement)
        if load.judgement.violations:
            self._handle(load.judgement, str(directory), load.step)
        elif self._ranks().rank == 0 and self._options.verbose:
            say(one_line(load.text))

    def _with_ranks(self, work: Callable[[AllRanks], T]) -> T | None:
        """Do work with all ranks; None where the checks are stopped, or stop by it.

        Raises UsageError, on all ranks, for what the user can help.
        """
        ranks = self._ranks()
        if self._stopped:
            return None
        try:
            return attempt(ranks, lambda: work(ranks))
        except Stopped as stopped:
            if not stopped.problem.place:
                raise UsageError(stopped.problem.text) from None
            self._stop(stopped.problem, ranks)
            return None

    @property
    def _observes(self) -> bool:
        return self.taken == self._next or self._record_bytes is not None

    def _after(self, number: int) -> int:
        return -1 if self._stopped else self._options.after(number)

    def _compare(self) -> None:
        self._compared = True
        ranks = self._ranks()
        try:
            attempt(ranks, lambda: check_same_model(self._model, ranks))
            self._in_pipeline = bool(pipeline_stages(self._model))
        except Stopped as stopped:
            self._stop(stopped.problem, ranks)

    def _stop(self, problem: Problem, ranks: AllRanks) -> None:
        """Check no further step; every rank does so at the same step."""
        self._stopped = True
        self._next, self._record_bytes, self._recorder = -1, None, None
        text = self._summary.stopped = stopped_text(self.taken, problem)
        if ranks.rank in (0, problem.rank):
            say(text)

    def begin(self) -> None:
        """Begin the observation of the step whose number is `taken`."""
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
            self._open_recorder(ranks)
        self._watch = Watch(
            self._model,
            self._optimizer,
            rank=ranks.rank,
            world_size=ranks.size,
            number=self.taken,
            listens=self._options.reference is not None,
            unjudged=IN_PIPELINE if self._in_pipeline else "",
        )
        self._watch.start()
        self._copied = time.perf_counter() - self._started

    def _open_recorder(self, ranks: AllRanks) -> None:
        limit, place = self._record_bytes, self._options.directory
        if limit is not None:
            try:
                self._recorder = attempt(
                    ranks, lambda: open_recorder(place, limit, self._options.semantics, ranks)
                )
            except Stopped as stopped:
                self._record_no_more(str(stopped))

    def _record_no_more(self, why: str) -> None:
        """Observe checked steps only, from now on, and say why."""
        self._record_bytes = self._recorder = None
        say(one_line(f"zerocheck: steps between the checked ones are not recorded: {why}"))

    def abandon(self) -> None:
        """Leave a step without judging it, as where the script raised an exception in it."""
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
        watch, self._watch = self._watch, None
        if watch is None:
            return
        if self.taken != self._next:
            self._record(watch)
            return
        started = time.perf_counter()
        self._next = self._after(self.taken)
        ranks = self._ranks()
        try:
            if self._arrivals is None or not self._arrivals.arrive(watch.number, ranks):
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
        self._summary.add(self.last)
        if self.last.violations:
            self._wrong.handle(
                observed,
                self.last,
                ranks,
                right=self._right,
                records=self._options.recorder is not None,
                recorder=self._recorder,
                judge=lambda one: self._judge(one, ranks),
            )
        else:
            self._right = self.taken
            if ranks.rank == 0 and self._options.verbose:
                seconds = self._copied + time.perf_counter() - started
                say(holds_line(self.taken, self.last, seconds))
        if self._recorder is not None:
            self._recorder.forget()
        if self._resume.follows_samples:
            self._handle_samples(self._with_ranks(self._resume.judge_samples))
        if self._resume.wants_next_step:
            self._next = self.taken + 1

    def _judge(self, observed: Observed, ranks: AllRanks) -> tuple[Observed, Verdict]:
        observed = with_norms(observed, ranks)
        verdict = judge_step(
            observed, ranks, reference=self._options.reference, semantics=self._options.semantics
        )
        return observed, verdict

    def _record(self, watch: Watch) -> None:
        """Keep a step that is not checked, on this rank alone, without communication."""
        try:
            if self._recorder is not None:
                self._recorder.keep(watch.observed())
        except Exception as error:
            self._record_no_more(f"{type(error).__name__}: {error}")
        finally:
            watch.stop()

    def _ranks(self) -> AllRanks:
        if not (dist.is_available() and dist.is_initialized()):
            return Alone()
        return RankGroup(self._options.group, computes_on(self._model))


def _print_summary(attached: weakref.ref[Attached]) -> None:
    """Print the summary of a run whose handle still exists, unless nothing was checked."""
    if (found := attached()) is not None and (found._summary.checked or found._summary.loads):
        say(found.summary)
