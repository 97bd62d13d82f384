"""Random delays that reorder ranks, and so show races that a quiet machine hides.

Three things are moved against each other:

- when a rank arrives: it sleeps before a loss, a collective, or an optimizer step;
- when an asynchronous collective begins: the caller goes on, and the operator is called later, on
  a thread. Collectives of a rank begin in the order in which they were called;
- so when it is over, here and on every rank that waits for this one.

What may be read or written only after `wait()` is thereby early or late; a program that waits
where it must gets the same bits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..case.schema import Case
from ..compat import Operators, wait_for_work, work_from_future
from .collectives import is_collective

WAITING = 64
"""Collectives of a rank that are waited for at once; more of them wait for their turn."""


class Delays:
    """Delays of up to `disturbance.delay` milliseconds, drawn per rank from the case's seed."""

    def __init__(self, case: Case, rank: int) -> None:
        self._random = random.Random(case.seed * 1024 + rank)
        self._longest = case.disturbance.delay / 1000

    def pause(self, *_: Any) -> None:
        """Sleep; not at all in a case without delays."""
        if self._longest:
            time.sleep(self.drawn())

    def drawn(self) -> float:
        """Draw a delay in seconds."""
        return self._random.random() * self._longest

    def heads(self) -> bool:
        """Toss a coin."""
        return self._random.random() < 0.5

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Delay each collective and each step of a torch optimizer within the context."""
        if not self._longest:
            yield
            return
        with ExitStack() as stack:
            hook = register_optimizer_step_pre_hook(self.pause)
            stack.callback(hook.remove)
            late = LateCollectives(self)
            stack.callback(late.finish)
            stack.enter_context(late)
            yield


class LateCollectives(Operators):
    """Context in which each collective is late.

    Half of them are called after a sleep. For the others the caller gets a Work at once, and they
    begin later.

    No collective begins before those that were called before it. An operator that returns no Work
    waits until they have begun, and so does one on tensors of a GPU.
    """

    def __init__(self, delays: Delays) -> None:
        super().__init__()
        self._delays = delays
        self._starter = ThreadPoolExecutor(1)
        self._waiter = ThreadPoolExecutor(WAITING)
        self._last: Future[None] | None = None
        self._failures: list[BaseException] = []

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._failures:
            raise self._failures[0]
        if not is_collective(func):
            return func(*args, **kwargs)
        # Of a GPU's collective the host waits for nothing: a Work is waited for on the stream of
        # whoever waits, and it begins on the stream of whoever calls. So it is called here, later.
        gives_work = _gives_work(func) and not _on_gpu(args)
        seconds = self._delays.drawn()
        if not gives_work or self._delays.heads():
            time.sleep(seconds)
            seconds = 0.0
        begun = self._last is None or self._last.done()
        if gives_work and (seconds or not begun):
            over: torch.futures.Future[Any] = torch.futures.Future()
            self._last = self._starter.submit(self._start, seconds, over, func, args, kwargs)
            return args[0], work_from_future(over)
        if self._last is not None:
            self._last.result()
        return func(*args, **kwargs)

    def _start(
        self,
        seconds: float,
        over: torch.futures.Future[Any],
        func: Any,
        args: Sequence[Any],
        given: Mapping[str, Any],
    ) -> None:
        time.sleep(seconds)
        try:
            with torch.no_grad():
                _, work = func(*args, **given)
        except BaseException as error:
            self._end(over, args[0], error)
        else:
            self._waiter.submit(self._wait, over, args[0], work)

    def _wait(self, over: torch.futures.Future[Any], result: Any, work: Any) -> None:
        try:
            wait_for_work(work)
        except BaseException as error:
            self._end(over, result, error)
        else:
            self._end(over, result)

    def _end(
        self, over: torch.futures.Future[Any], result: Any, error: BaseException | None = None
    ) -> None:
        """Wake all waiters. A failure is raised at the caller's next operator."""
        if error is not None:
            self._failures.append(error)
        # As gloo's own: a list of tensors, of which DDP reads the first.
        over.set_result([result] if isinstance(result, torch.Tensor) else result)

    def finish(self) -> None:
        """Start all pending collectives, so that ranks are in step. Waits for no other rank."""
        self._starter.shutdown(wait=True)
        self._waiter.shutdown(wait=False)
        if self._failures:
            raise self._failures[0]


def _on_gpu(given: Any) -> bool:
    if isinstance(given, torch.Tensor):
        return not given.is_cpu
    return isinstance(given, list | tuple) and any(map(_on_gpu, given))


def _gives_work(func: Any) -> bool:
    """Return True for an operator that returns (its first argument, a Work)."""
    return len(func._schema.returns) == 2
