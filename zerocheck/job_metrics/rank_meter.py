"""Meter of the steps of one rank: seconds of each, and more of a few."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import torch
from torch import nn

from .activations import Activations
from .model_size import rank_memory
from .records import RankFigures, StepSeconds
from .step_timer import StepTimer

FIRST, AT_ONCE = 5, 3
"""First step of a job that is timed, and how many are before it is one in `every`."""


class RankMeter:
    """Meter of this rank's steps.

    Of a chosen step the collectives are timed, and the activations of the next one are weighed,
    since that takes time. Both are put off to a step in which nothing else is observed.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], every: int, done: int
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._every = every
        self._next, self._left = done + FIRST, AT_ONCE
        self._timer: StepTimer | None = None
        self._chosen: int | None = None
        self._figures: RankFigures | None = None
        self._activations: Activations | None = None
        self._began = self._ended = 0
        self._between: float | None = None
        self._observed = False

    def begin(self, step: int, *, observed: bool) -> None:
        """Begin a step. observed: something else is measured in it."""
        now = time.monotonic_ns()
        self.abandon(step - 1)
        self._between = (now - self._ended) / 1e9 if self._ended else None
        self._observed = observed
        if not observed and self._chosen is not None:
            self._activations = Activations()
            self._activations.__enter__()  # type: ignore[no-untyped-call]
        elif not observed and step >= self._next:
            self._timer = StepTimer(self._model, self._optimizers)
            self._timer.start()
        self._began = time.monotonic_ns()

    def end(self, step: int) -> tuple[StepSeconds, tuple[int, RankFigures] | None]:
        """End a step; return its seconds, and with the step's number the figures that are whole."""
        now = time.monotonic_ns()
        timer, activations, whole = self._timer, self._activations, None
        if timer is not None:
            timed = timer.stop()
            self._timer, self._chosen = None, step
            self._figures = RankFigures(
                timed=timed, tokens=timer.tokens, microbatches=timer.microbatches
            )
        elif activations is not None and self._chosen is not None:
            self._leave_activations()
            if self._figures is not None:
                memory = rank_memory(self._model, self._optimizers, activations.bytes)
                whole = self._chosen, msgspec.structs.replace(self._figures, memory=memory)
            self._choose_next(step)
        measured = self._observed or timer is not None or activations is not None
        seconds = StepSeconds(step, (now - self._began) / 1e9, self._between, measured)
        self._ended = time.monotonic_ns()
        return seconds, whole

    def abandon(self, step: int) -> None:
        """Leave a step that did not end, and have no figures of it: the others may end it.

        So the next step of this rank is what it is on the others.
        """
        if self._timer is not None:
            self._timer.close()
            self._timer, self._figures, self._chosen = None, None, step
        elif self._activations is not None:
            self._leave_activations()
            self._choose_next(step)

    def _leave_activations(self) -> None:
        if self._activations is not None:
            self._activations.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._activations = None

    def _choose_next(self, step: int) -> None:
        self._figures = self._chosen = None
        self._left = max(0, self._left - 1)
        self._next = step + 1 if self._left else (step // self._every + 1) * self._every
