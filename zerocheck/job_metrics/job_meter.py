"""Meter of a job: figures of all ranks, their sinks, and what they show."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec

import torch
import torch.distributed as dist
from torch import nn

from ..foreign_text import one_line
from ..protocol.verdicts import Judgement
from .figures_exchange import FiguresExchange
from .job_history import JobHistory, oom_text
from .model_size import model_size, rank_memory
from .options import JobMetrics
from .out_of_memory import is_out_of_memory, on_uncaught, place_of
from .rank_meter import RankMeter
from .records import CheckedStep, CheckpointTime, JobRecord, OutOfMemory
from .sinks import open_sinks
from .timed_step import timed_step

Given = ParamSpec("Given")


def _guarded(
    method: Callable[Concatenate[JobMeter, Given], None],
) -> Callable[Concatenate[JobMeter, Given], None]:
    """Wrap a method to do nothing once the metrics have ended, and end them at an error."""

    @wraps(method)
    def guarded(self: JobMeter, /, *args: Given.args, **kwargs: Given.kwargs) -> None:
        if not self._on:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self._on = False
            with suppress(Exception):
                self._meter.abandon(self._step)
            text = one_line(f"{type(error).__name__}: {error}")
            self._say(f"zerocheck: metrics end here: {text}")

    return guarded


class JobMeter:
    """Metrics of a job, of which each rank measures its own and rank 0 writes those of all.

    An error in here ends the metrics, which `say` is told, and never the training.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        options: JobMetrics,
        group: dist.ProcessGroup | None,
        *,
        rank: int,
        world_size: int,
        computes_on: torch.device,
        done: int,
        say: Callable[[str], None],
    ) -> None:
        """Open the sinks. done: steps before the first. Raises UsageError if they cannot be."""
        self._model, self._optimizers, self._options = model, optimizers, options
        self._rank, self._alone, self._say = rank, world_size == 1, say
        self._exchange = FiguresExchange(group, rank, world_size)
        self._meter = RankMeter(model, optimizers, options.every, done)
        self._history = JobHistory(model_size(model, computes_on))
        self._sinks = open_sinks(options, rank)
        self._step = done
        self._on = True
        self._noted: tuple[int, int] | None = None
        on_uncaught(weakref.WeakMethod(self.note_error))

    @_guarded
    def begin(self, step: int, *, observed: bool) -> None:
        """Begin a step. observed: it is checked, or recorded."""
        self._step = step
        self._receive()
        self._meter.begin(step, observed=observed)

    @_guarded
    def end(self) -> None:
        """End a step."""
        seconds, figures = self._meter.end(self._step)
        if self._rank == 0:
            self._add(seconds)
        if figures is not None:
            self._exchange.send(*figures)

    @_guarded
    def abandon(self, error: BaseException | None) -> None:
        """Leave a step, in which the script raised an error if one is given."""
        self._meter.abandon(self._step)
        if error is not None:
            self.note_error(error)

    @_guarded
    def note_error(self, error: BaseException) -> None:
        """Record where the error was raised, if this rank ran out of memory by it."""
        key = self._step, id(error)  # not the error, whose frames hold what filled the memory
        if not is_out_of_memory(error) or key == self._noted:
            return
        self._noted = key
        phase, module, place = place_of(error, self._model)
        record = OutOfMemory(
            step=self._step,
            rank=self._rank,
            phase=phase,
            module=module,
            place=place,
            error=one_line(str(error).partition("\n")[0]),
            memory=rank_memory(self._model, self._optimizers, None),
        )
        self._say(f"zerocheck: {oom_text(record)}")
        self._add(record)

    @contextmanager
    def checkpoint(self, what: str, folder: Path, *, replaced: bool) -> Iterator[None]:
        """Time a "save" or a "load" of a checkpoint. replaced: an older one is there."""
        began = time.monotonic()
        yield
        self._note_checkpoint(what, folder, time.monotonic() - began, replaced)

    @_guarded
    def _note_checkpoint(self, what: str, folder: Path, seconds: float, replaced: bool) -> None:
        if self._rank == 0:
            record = CheckpointTime(
                step=self._step, what=what, folder=str(folder), seconds=seconds, replaced=replaced
            )
            self._add(record)

    @_guarded
    def note_check(self, judgement: Judgement, seconds: float) -> None:
        """Record the verdict on the step that ended last."""
        if self._rank == 0:
            violated = tuple(dict.fromkeys(one.obligation for one in judgement.violations))
            causes = judgement.violations[0].causes if judgement.violations else ()
            self._add(CheckedStep(self._step, violated, causes, seconds))

    def lines(self) -> list[str]:
        """Return few lines on the job, on rank 0."""
        self._catch_up()
        return self._history.lines()

    @_guarded
    def close(self) -> None:
        """Write what is left, and close the sinks."""
        self._catch_up()
        self._on = False
        for sink in self._sinks:
            sink.close()

    @_guarded
    def _catch_up(self) -> None:
        if self._alone or dist.is_initialized():  # or the store is gone
            self._receive()

    def _receive(self) -> None:
        if self._rank == 0:
            for step, figures in self._exchange.received():
                data_ranks, period = self._options.data_ranks, self._history.period
                self._add(timed_step(step, figures, data_ranks, period))

    def _add(self, record: JobRecord) -> None:
        for sink in self._sinks:
            sink.write(record)
        for pattern in self._history.add(record):
            self._say(f"zerocheck: {pattern.pattern}: {pattern.text}")
            for sink in self._sinks:
                sink.write(pattern)
