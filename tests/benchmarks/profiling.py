"""Where the time of a case goes, by timers around the parts of the drive and the judge.

`run` is the target of a pool: it does what zerocheck's own does, with timers; the payload `TIMES`
asks for them. In ranks, processor time is counted, gloo's and autograd's threads included, since
wall time there is mostly waiting for the others; in the judge, which is alone, wall time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from zerocheck.drive import poison, rank, recorder, steps
from zerocheck.judge import assemble, context, local, ownership, state, update
from zerocheck.judge import case as judge_case
from zerocheck.judge.obligations import gradient, loss, publish
from zerocheck.ranks.context import RankContext

TIMES = b"times"


class Timers:
    """Seconds by section, each without the sections inside of it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = []

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        self._inner.append(0.0)
        started = self.clock()
        try:
            yield
        finally:
            took = self.clock() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + took - self._inner.pop()
            if self._inner:
                self._inner[-1] += took

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        @functools.wraps(function)
        def timed(*given: Any, **named: Any) -> Any:
            with self.section(name):
                return function(*given, **named)

        return timed


# The ranks

_timers = Timers(time.process_time)

RANK_PARTS: tuple[tuple[object, str, str], ...] = (
    (steps, "batch", "drawing samples"),
    (recorder.Recorder, "take", "recorder"),
    (poison, "_resize_and_fill", "filling storages that grow"),
    (steps.ForwardProbe, "_before", "forward hooks"),
    (steps.ForwardProbe, "_after", "forward hooks"),
)
"""(owner, attribute, section) of what `train_step()` and its surroundings call."""


def run(payload: bytes, context: RankContext) -> bytes:
    """A job of zerocheck's, timed, or the times so far, which begin anew."""
    if payload == TIMES:
        taken = json.dumps(_timers.seconds).encode()
        _timers.seconds = {}
        return taken
    _instrument()
    with _timers.section("job, reply and the rest"):
        return rank.run(payload, context)


@functools.cache
def _instrument() -> None:
    built = steps.Driver._built

    def built_and_timed(driver: steps.Driver) -> Any:
        with _timers.section("model, wrapping, restore"):
            subject, probe = built(driver)
        shards = subject.shards
        subject.shards = _timers.around("shards()", lambda: list(shards()))  # type: ignore[method-assign]
        subject.train_step = _timers.around("train_step()", subject.train_step)  # type: ignore[method-assign]
        return subject, probe

    observe = steps.Driver._observe

    def observe_and_tell_apart(driver: steps.Driver, *given: Any, last: bool) -> Any:
        if not last:
            return observe(driver, *given, last=last)
        before = dict(_timers.seconds)
        seen = observe(driver, *given, last=last)
        extra = _timers.seconds["train_step()"] - before["train_step()"]
        _timers.seconds["train_step()"] -= extra
        name = "the last pass"
        _timers.seconds[name] = _timers.seconds.get(name, 0.0) + extra
        return seen

    for owner, attribute, name in RANK_PARTS:
        setattr(owner, attribute, _timers.around(name, getattr(owner, attribute)))
    steps.Driver._built = built_and_timed  # type: ignore[method-assign]
    steps.Driver._observe = observe_and_tell_apart  # type: ignore[method-assign]


# The judge

JUDGE_PARTS: tuple[tuple[object, str, str], ...] = (
    (judge_case, "judge", "the rest of the judge"),
    (context, "build_model", "model and layout"),
    (state, "initial_state", "model and layout"),
    (local.LocalRunner, "run", "local passes: loading, harvesting"),
    (local, "local_pass", "local passes: forward and backward"),
    (local, "batch", "local passes: drawing samples"),
    (context, "expected", "gradient: enclosure"),
    (gradient, "check", "gradient: comparison"),
    (update.UpdateJudge, "check", "update"),
    (publish, "check", "publish"),
    (loss, "check", "loss"),
    (ownership.Ownership, "check", "ownership"),
    (assemble.Observation, "_assemble", "assembly"),
    (state.State, "observed", "state"),
)


@contextlib.contextmanager
def judge_timed() -> Iterator[dict[str, float]]:
    """Within it, the judge's parts are timed; the seconds are in the mapping afterwards."""
    timers = Timers(time.perf_counter)
    with contextlib.ExitStack() as stack:
        for owner, attribute, name in JUDGE_PARTS:
            timed = timers.around(name, getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, timed))
        # What imported the function by its name has another reference to it.
        from zerocheck.run.execute import outcome

        stack.enter_context(mock.patch.object(outcome, "judge", judge_case.judge))
        yield timers.seconds
