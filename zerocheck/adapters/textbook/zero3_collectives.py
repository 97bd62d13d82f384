"""Collectives of the textbook ZeRO-3: its rules, replayed on the trace of the bare model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ...case.schema import Case
from ...case.traits import reduced_precision
from ..shared.calls import Calls, CollectivePrediction
from ..shared.live_memory import terms_of
from ..shared.trace import ROOT, UnitEvent, is_of_case, or_none, trace, traces
from ..shared.units import unit_modules
from .call_order import CallOrder
from .collectives import averaging, clipping, flat_of, scaling
from .reduction import DEPTH
from .unit import FlatUnit, unit_parts


class _Unit:
    """Unit's flat parameters to gather and to reduce, and whether it is gathered."""

    def __init__(self, parts: Iterable[FlatUnit], case: Case) -> None:
        flats = [(flat_of(part.named, case), part) for part in parts]
        self.gathers = [flat for flat, _ in flats]
        self.reduces = [
            (flat, part.named[0][1].requires_grad)  # False if it learns later
            for flat, part in flats
            if part.learns
        ]
        self.gathered = False


class _Zero3Replay:
    """State of Zero3, without tensors."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.case = case
        self.calls = Calls(case)
        self.live = self.calls.live
        parts = unit_parts(model, case, unit_modules(model, case.sharding))
        *self.units, self.root = [_Unit(part, case) for part in parts]
        self.order = CallOrder[_Unit](case.sharding.prefetch)
        self.late = False

    def microbatch(self, events: list[UnitEvent], step: int, *, last: bool) -> None:
        """Replay one forward and backward."""
        for unit in (*self.units, self.root):
            self._release(unit)
        self.order.start()
        self.calls.at(step, "forward")
        for event in self.calls.follow(events, last=last):
            if event.what == "parameter":
                self.live.gradient(event.name, event.bytes)
            elif event.what == "enter":
                self._enter(event)
            elif event.what == "leave" and not event.again:
                self._leave(event)
            elif event.what == "output" and event.unit != ROOT:
                self._before_backward(event.number)
        for unit in (*self._closed(-1, []), self.root):
            self._reduce(unit)
            self._release(unit)
        for key in self.live.keys("bucket"):
            self.live.free("bucket", key)

    def _enter(self, event: UnitEvent) -> None:
        if event.unit == ROOT:
            self._gather(self.root)
            return
        unit = self.units[event.unit]
        self._gather(unit)
        if not event.again:
            for later in self.order.enter(unit):
                self._gather(later)

    def _leave(self, event: UnitEvent) -> None:
        if not self.case.sharding.reshard:
            return
        if event.unit == ROOT:
            for unit in self.units:
                self._release(unit)
        elif self.units[event.unit] not in self.order.ahead():
            self._release(self.units[event.unit])

    def _before_backward(self, number: int) -> None:
        if not self.order.is_open(number):
            return
        ahead = self.order.behind(number)
        done = self._closed(number, ahead)
        for unit in ahead:
            self._gather(unit)
        for unit in done:
            self._reduce(unit)

    def _closed(self, number: int, keep: list[_Unit]) -> list[_Unit]:
        done = []
        for unit, over in self.order.close(number):
            if over:
                done.append(unit)
            if unit not in keep and (over or self.case.sharding.reshard):
                self._release(unit)
        return done

    def _gather(self, unit: _Unit) -> None:
        if not unit.gathered:
            for number, flat in enumerate(unit.gathers):
                self.live.hold("gathered", (unit, number), flat.bytes)
                self.calls.add("all_gather", flat.elements, flat.dtype)
            unit.gathered = True

    def _release(self, unit: _Unit) -> None:
        for number, _ in enumerate(unit.gathers):
            self.live.free("gathered", (unit, number))
        unit.gathered = False

    def _reduce(self, unit: _Unit) -> None:
        for number, (flat, learns) in enumerate(unit.reduces):
            if learns or self.late:
                buckets = self.live.keys("bucket")
                for key in buckets[: len(buckets) + 1 - DEPTH]:
                    self.live.free("bucket", key)
                self.live.hold("bucket", (unit, number), flat.bytes)
                for name in flat.names:
                    self.live.free("other", name)
                self.calls.add("reduce_scatter", flat.elements, flat.reduced)


@or_none
def zero3(model: nn.Module, case: Case) -> CollectivePrediction | None:
    """Predict the calls: prefetching starts once a forward's order is known; each backward reduces.

    None for another model than that of the case.
    """
    if not is_of_case(model, case):
        return None
    replay = _Zero3Replay(model, case)
    for unit in (*replay.units, replay.root):
        for number, (flat, _) in enumerate(unit.reduces):
            replay.live.hold("gradient", (unit, number), flat.bytes_of_shard(flat.dtype))
    calls = replay.calls

    def go(step: int) -> list[UnitEvent]:
        return trace(case, lambda bare: unit_modules(bare, case.sharding), step=step, at_base=True)

    for step, late, events in traces(case, calls.steps, go):
        replay.late = late
        for number in range(case.training.microbatches):
            last = number == case.training.microbatches - 1
            replay.microbatch(events, step, last=last)
        calls.at(step, "backward")
        units = (*replay.units, replay.root)
        reduced = [flat for unit in units for flat, learns in unit.reduces if learns or late]
        averaging(calls, case, reduced)
        scaling(calls, case)
        calls.at(step, "step")
        calls.live.at(step, "step")
        clipping(calls, case)
    if reduced_precision(case):
        # The trace through the bare model is in fp32.
        return CollectivePrediction(tuple(calls.done))
    return calls.prediction(terms_of(case))
