"""`zerocheck.attach`: checks of chosen steps of a running training script."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from ..contract.semantics import Semantics
from ..errors import UsageError, Violated, unknown
from ..foreign_text import copyable, one_line, printable
from ..protocol.verdicts import Judgement
from . import bundle as bundles
from .arrivals import Arrivals
from .exchange import Verdict, judge_step, with_norms
from .holdings import check_parameters, computes_on, words_for
from .optimizers import check_kind, observed_optimizer
from .ranks import AllRanks, Alone, Problem, RankGroup, Stopped, attempt
from .reference import Factory
from .same_model import IN_PIPELINE, check_same_model, pipeline_stages
from .step_record import Observed
from .text import fingerprint, first_of, holds_line, stopped_text, violated_text
from .watch import Watch

OnViolation = Literal["raise", "warn"]


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
    quiet: bool = False,
) -> Attached:
    """Check chosen steps of a training run that uses `model` and `optimizer` as always.

        check = zerocheck.attach(model, optimizer)
        for x, y in loader:
            with check.step():
                loss_fn(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    Every rank calls this, after the model is wrapped and its optimizer made. The block is around
    all that belongs to one update: all microbatches, clipping, `optimizer.step()`.

    model         as it is called in training: of DDP, FSDP1, FSDP2, torch.compile, or plain
    optimizer     torch.optim.AdamW or SGD, or a subclass, also within ZeroRedundancyOptimizer or a
                  wrapper such as that of Accelerate; `optimizer.step(closure)` is supported
    reference     function without arguments that makes the model before it is wrapped. With it
                  gradients are judged too: each rank calls that model with what `model` was called
                  with, and gives its outputs the gradients that came to them from outside. Where a
                  loss reaches the parameters past the outputs of `model`, they are not judged, and
                  the line of the step says so
    semantics     how gradients of ranks become one (`average`, `unused`); default: their mean
    steps         numbers of steps to check; the first after `attach` is 1
    every         check each step whose number is a multiple of it, too; None: no others
    directory     where a violated step is written, for `zerocheck replay`
    on_violation  "raise": Violated, on all ranks; "warn": rank 0 prints it, and training goes on
    done          steps taken before, for a run that is resumed: its first step is done + 1
    group         the ranks that train this model; default: all. In a pipeline: those of one stage
    quiet         say nothing of steps in which all holds

    On a checked step each rank copies its shards to the CPU, before and after, and the gradient:
    seven times the bytes of its parameters, until the step is judged. On all other steps one
    integer is compared, and nothing is hooked.

    Raises UsageError for an argument, an optimizer or a dtype that cannot be judged. After that
    only a violation ends the training, with on_violation="raise": where zerocheck fails, or meets
    what it does not support, it prints why, and checks no further step.
    """
    return Attached(
        model,
        optimizer,
        reference=reference,
        semantics=semantics or Semantics(),
        steps=steps,
        every=every,
        directory=Path(directory),
        on_violation=on_violation,
        done=done,
        group=group,
        quiet=quiet,
    )


class Attached:
    """Handle that `attach` returns.

    `taken`: the number of the last step that began; `last`: the verdict on the last step that was
    checked, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        reference: Factory | None,
        semantics: Semantics,
        steps: Iterable[int],
        every: int | None,
        directory: Path,
        on_violation: OnViolation,
        done: int,
        group: dist.ProcessGroup | None,
        quiet: bool,
    ) -> None:
        if on_violation not in get_args(OnViolation):
            raise unknown("on_violation", str(on_violation), get_args(OnViolation))
        self._steps = sorted(_numbers(steps))
        if every is not None and (not isinstance(every, int) or every < 1):
            raise UsageError(f"every is {every!r} (allowed: an int from 1 on, or None)")
        self._every = every
        if reference is not None and not callable(reference):
            raise UsageError(
                f"reference= is of type {type(reference).__name__} (allowed: a function without "
                "arguments that returns the model before it is wrapped)"
            )
        self._reference, self._semantics = reference, semantics
        self._model, self._optimizer = model, observed_optimizer(optimizer)
        self._directory, self._on_violation, self._quiet = directory, on_violation, quiet
        self._group = group
        self._watch: Watch | None = None
        self._known: set[str] = set()
        self._checking = _Checking(self)
        self._compared = self._stopped = self._in_pipeline = False
        self.taken = done
        self.last: Judgement | None = None
        self._next = self._after(done)
        self._arrivals: Arrivals | None = None
        ranks = self._ranks()
        try:
            attempt(ranks, self._check_optimizer)
        except Stopped as stopped:
            if not stopped.problem.place:
                raise UsageError(stopped.problem.text) from None
            self._stop(stopped.problem, ranks)
        if dist.is_available() and dist.is_initialized():
            self._compare()

    def _check_optimizer(self) -> None:
        check_kind(self._optimizer)
        check_parameters(self._model, self._optimizer)

    def step(self) -> _UncheckedStep:
        """Return the context for one update; it costs a comparison, unless the step is checked."""
        self.taken += 1
        return _NOTHING if self.taken != self._next else self._checking

    def before(self) -> None:
        """Begin a step, where a `with` does not fit; `after` ends it."""
        self.taken += 1
        if self.taken == self._next:
            self._begin()

    def after(self) -> None:
        """End a step that began with `before`."""
        if self._watch is not None:
            self._end()

    def _after(self, number: int) -> int:
        """Return the next step to check after this one; -1 for none."""
        after = [step for step in self._steps if step > number]
        if self._every is not None:
            after.append((number // self._every + 1) * self._every)
        return -1 if self._stopped else min(after, default=-1)

    def _compare(self) -> None:
        """Stop the checks if the ranks do not train one model."""
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
        self._next = -1
        if ranks.rank in (0, problem.rank):
            _say(stopped_text(self.taken, problem))

    def _begin(self) -> None:
        self._started = time.perf_counter()
        if self._watch is not None:  # the step before was left without `after`
            self._abandon()
        if not self._compared:
            self._compare()
        if self._stopped:
            return
        ranks = self._ranks()
        if self._arrivals is None:
            self._arrivals = Arrivals(self._group)
        self._watch = Watch(
            self._model,
            self._optimizer,
            rank=ranks.rank,
            world_size=ranks.size,
            number=self.taken,
            listens=self._reference is not None,
            unjudged=IN_PIPELINE if self._in_pipeline else "",
        )
        self._watch.start()
        self._copied = time.perf_counter() - self._started

    def _abandon(self) -> None:
        """Leave a step without judging it, as where the script raised an exception in it."""
        self._next = self._after(self.taken)
        watch, self._watch = self._watch, None
        if watch is not None and self._arrivals is not None:
            watch.stop()
            with suppress(RuntimeError):  # the store is gone, and with it the other ranks
                self._arrivals.leave(watch.number)

    def _end(self) -> None:
        watch, self._watch = self._watch, None
        if watch is None:
            return
        started = time.perf_counter()
        self._next = self._after(self.taken)
        ranks = self._ranks()
        try:
            if self._arrivals is None or not self._arrivals.arrive(watch.number, ranks):
                return
            observed, verdict = attempt(ranks, lambda: self._judge(watch, ranks))
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
        if verdict.judgement.violations:
            self._violated(observed, verdict.judgement, ranks)
        elif ranks.rank == 0 and not self._quiet:
            seconds = self._copied + time.perf_counter() - started
            _say(holds_line(self.taken, self.last, seconds))

    def _judge(self, watch: Watch, ranks: AllRanks) -> tuple[Observed, Verdict]:
        observed = with_norms(watch.observed(), ranks)
        verdict = judge_step(observed, ranks, reference=self._reference, semantics=self._semantics)
        return observed, verdict

    def _violated(self, observed: Observed, judgement: Judgement, ranks: AllRanks) -> None:
        """Write the bundle of a new finding, print it, and raise if that is wanted."""
        what = words_for(self._model, self._optimizer)
        marks = {fingerprint(what, violation) for violation in judgement.violations}
        place = ""
        if marks - self._known:
            place = self._written(observed, judgement, ranks)
        self._known |= marks
        if ranks.rank == 0:
            _say(violated_text(what, judgement, place))
        if self._on_violation == "raise":
            first = first_of(judgement)
            where = f"; {copyable(('zerocheck', 'replay', place))}" if place else ""
            message = f"step {self.taken}: {first.obligation}: {first.explanation}"
            raise Violated(one_line(message) + where)

    def _written(self, observed: Observed, judgement: Judgement, ranks: AllRanks) -> str:
        """Write the bundle and return its folder; empty if a rank cannot, which is printed."""

        def write() -> str:
            place = ""
            if ranks.rank == 0:
                place = str(bundles.place_for(self._directory, self.taken))
            place = ranks.broadcast(place.encode()).decode()
            bundles.write(Path(place), observed, judgement, self._semantics, ranks)
            return place

        try:
            return attempt(ranks, write)
        except Stopped as stopped:
            if ranks.rank in (0, stopped.problem.rank):
                text = f"zerocheck: step {self.taken} cannot be kept for `zerocheck replay`: "
                text += f"{stopped} (rank {stopped.problem.rank})"
                _say(one_line(text))
            return ""

    def _ranks(self) -> AllRanks:
        if not (dist.is_available() and dist.is_initialized()):
            return Alone()
        return RankGroup(self._group, computes_on(self._model))


def _say(text: str) -> None:
    """Print next to the output of the training."""
    print(printable(text), file=sys.stderr, flush=True)


def _numbers(steps: Iterable[int]) -> set[int]:
    numbers = set(steps)
    for number in numbers:
        if not isinstance(number, int) or number < 1:
            raise UsageError(f"steps holds {number!r} (allowed: ints from 1 on)")
    return numbers


class _UncheckedStep:
    """Context of a step that is not checked."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


_NOTHING = _UncheckedStep()


class _Checking(_UncheckedStep):
    """Context of a step that is checked."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached

    def __enter__(self) -> None:
        self._attached._begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._attached._end()
        else:
            self._attached._abandon()
