"""Collectives of the textbook ZeRO-3: its rules, replayed on the trace of the bare model."""

from __future__ import annotations

from torch import nn

from ...case.schema import Case
from ...case.shapes import unfrozen
from ...case.traits import reduced_precision
from ..shared.calls import Calls, CollectivePrediction
from ..shared.live_memory import terms_of
from ..shared.trace import ROOT, UnitEvent, is_of_case, or_none, trace, traces
from ..shared.units import unit_modules
from .collectives import FlatSpec, averaging, clipping, flat_of, scaling
from .flat import alike
from .reduction import DEPTH


class _Unit:
    """Unit's flat parameters to gather and to reduce, and its current state."""

    def __init__(self) -> None:
        self.gathers: list[FlatSpec] = []
        self.reduces: list[tuple[FlatSpec, bool]] = []  # whether it learns from the first step on
        self.names: list[list[str]] = []  # of the parameters in what is reduced
        self.gathered = False
        self.first_call = -1


class _Zero3Replay:
    """State of Zero3, without tensors."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.case = case
        self.calls = Calls(case)
        self.live = self.calls.live
        modules = unit_modules(model, case.sharding)
        names = {parameter: name for name, parameter in model.named_parameters()}
        parts = [[(names.pop(p), p) for p in module.parameters()] for module in modules]
        self.units = [self._unit(part) for part in parts]
        self.root = self._unit([(name, p) for p, name in names.items()])
        self.order: list[int] = []  # units of the calls of this forward
        self.expected: list[int] = []  # and of the forward before
        self.open: list[int] = []
        self.late = False

    def _unit(self, named: list[tuple[str, nn.Parameter]]) -> _Unit:
        later = unfrozen(self.case)
        unit = _Unit()
        for learns in (True, False):
            half = [pair for pair in named if pair[1].requires_grad == learns]
            for part in alike(half, self.case):
                flat = flat_of(part, self.case)
                unit.gathers.append(flat)
                if learns or part[0][0] in later:
                    unit.reduces.append((flat, learns))
                    unit.names.append([name for name, _ in part])
        return unit

    def microbatch(self, events: list[UnitEvent], step: int, *, last: bool) -> None:
        """Replay one forward and backward."""
        for unit in (*self.units, self.root):
            self._release(unit)
            unit.first_call = -1
        self.expected, self.order, self.open = self.order, [], []
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
            number = len(self.order)
            if unit.first_call < 0:
                unit.first_call = number
            self.order.append(event.unit)
            self.open.append(number)
            for later in self._ahead(number):
                self._gather(later)

    def _leave(self, event: UnitEvent) -> None:
        if not self.case.sharding.reshard:
            return
        if event.unit == ROOT:
            for unit in self.units:
                self._release(unit)
        elif self.units[event.unit] not in self._ahead(len(self.order) - 1):
            self._release(self.units[event.unit])

    def _ahead(self, number: int) -> list[_Unit]:
        if self.expected[number : number + 1] != self.order[number:]:
            return []
        last = number + 1 + self.case.sharding.prefetch
        return [self.units[unit] for unit in self.expected[number + 1 : last]]

    def _before_backward(self, number: int) -> None:
        if not self.open or number > self.open[-1]:
            return
        first = max(0, number - self.case.sharding.prefetch)
        ahead = [self.units[unit] for unit in self.order[first : number + 1]][::-1]
        done = self._closed(number, ahead)
        for unit in ahead:
            self._gather(unit)
        for unit in done:
            self._reduce(unit)

    def _closed(self, number: int, keep: list[_Unit]) -> list[_Unit]:
        done = []
        while self.open and self.open[-1] > number:
            last = self.open.pop()
            unit = self.units[self.order[last]]
            over = last == unit.first_call
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
                for name in unit.names[number]:
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
            replay.live.hold("gradient", (unit, number), flat.bytes // case.axes.size("shard"))
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
        return CollectivePrediction(
            tuple(calls.done)
        )  # the trace through the bare model is in fp32
    return calls.prediction(terms_of(case))
