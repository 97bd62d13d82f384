"""Timer of one step: its collectives, its forwards and its optimizer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from .records import StepTimes
from .timed_collectives import TimedCollectives, clock


class StepTimer:
    """Times of one step of this rank, between `start` and `stop`."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._trace = TimedCollectives()
        self._hooks = ExitStack()
        self._forward = self._entered = self._reduced = 0
        self.tokens = self.microbatches = 0
        for hook in (
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave),
            *(one.register_step_pre_hook(self._reduce) for one in optimizers),
        ):
            self._hooks.callback(hook.remove)

    def start(self) -> None:
        """Begin the step."""
        self._hooks.enter_context(self._trace)
        self._trace.start()
        self._began = time.monotonic_ns()

    def stop(self) -> StepTimes:
        """End the step, and return its times."""
        ended = time.monotonic_ns()
        calls, copied = self._trace.stop(ended)
        self.close()
        return StepTimes(
            self._began, ended, self._forward, self._reduced, copied, calls, clock=clock()
        )

    def close(self) -> None:
        """Observe no more."""
        self._hooks.close()

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.microbatches += 1
        self.tokens += tokens_in(args, kwargs)
        self._entered = time.monotonic_ns()

    def _leave(self, *_: Any) -> None:
        self._forward += time.monotonic_ns() - self._entered

    def _reduce(self, *_: Any) -> None:
        self._reduced = self._reduced or time.monotonic_ns()


def tokens_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Count the tokens that a model is called with: integers of a tensor with two dims or more.

    `input_ids` if there is one of that name, else the first such argument; 0 without one.
    """
    given = kwargs.get("input_ids"), *args, *kwargs.values()
    for one in given:
        if (
            isinstance(one, torch.Tensor)
            and one.dim() > 1
            and one.dtype in (torch.int32, torch.int64)
        ):
            return one.numel()
    return 0
