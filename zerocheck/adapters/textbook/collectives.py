"""Collectives of the textbook stages: their rules, replayed on the trace of the bare model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from ...case.schema import Case
from ...case.traits import reduced_precision
from ...models.blocks import DTYPES
from ..shared.calls import SIZES, Calls, CollectivePrediction, dtype_name
from ..shared.live_memory import terms_of
from ..shared.trace import ROOT, UnitEvent, is_of_case, or_none, trace, traces
from ..shared.units import unit_modules
from .bucket import parts_of
from .flat import Named, needs_whole
from .partition import Partition, aligned
from .reduction import DEPTH
from .unit import CallOrder, FlatUnit, unit_parts


class FlatSpec(NamedTuple):
    """Flat buffer of parameters of one dtype, without tensors; see precision.py."""

    names: tuple[str, ...]
    partition: Partition
    dtype: str
    """Dtype of what is computed with."""
    reduced: str
    """Dtype of gradients."""
    updated: str
    """Dtype of what the optimizer updates, and of its states."""
    masters: bool
    """True if that is not what is computed with."""

    @property
    def elements(self) -> int:
        """Number of elements with padding."""
        return self.partition.numel

    @property
    def bytes(self) -> int:
        """Size of the whole buffer in bytes."""
        return self.elements * SIZES[self.dtype]

    def bytes_of_shard(self, dtype: str) -> int:
        """Size of a rank's shard in bytes, in a dtype."""
        return self.partition.shard_size * SIZES[dtype]


def flat_of(named: Named, case: Case) -> FlatSpec:
    """Return the flat buffer of parameters of one dtype."""
    first, masters = named[0][1], reduced_precision(case)
    shapes = [(name, tuple(parameter.shape)) for name, parameter in named]
    dtype = DTYPES[case.precision.compute] if masters else first.dtype
    reduced = DTYPES[case.precision.reduce] if masters else first.dtype
    ranks, whole = case.axes.size("shard"), needs_whole(named, case)
    partition = Partition(shapes, ranks, aligned(dtype.itemsize), whole=whole)
    names = tuple(name for name, _ in named)
    kept, sent, updated = map(dtype_name, (dtype, reduced, first.dtype))
    return FlatSpec(names, partition, kept, sent, updated, masters)


def buckets(model: nn.Module, case: Case) -> list[FlatSpec]:
    """Return the buckets of ZeRO-1 and ZeRO-2, in their order."""
    return [flat_of(named, case) for named in parts_of(model, case)]


def averaging(calls: Calls, case: Case, flats: Iterable[FlatSpec]) -> None:
    """Add the calls that average the shards of flat gradients over replicas."""
    if case.axes.size("replicate") > 1:
        for flat in flats:
            calls.over_replicas(flat.elements // case.axes.size("shard"), flat.reduced)


def scaling(calls: Calls, case: Case) -> None:
    """Add the call with which ranks agree on an overflow."""
    if case.training.loss_scale is not None:
        calls.add("all_reduce", 1, "float32")


def clipping(calls: Calls, case: Case) -> None:
    """Add the call that sums the gradient norm, in fp64."""
    if case.training.clip is not None:
        calls.add("all_reduce", 1, "float64")


def zero1(model: nn.Module, case: Case) -> CollectivePrediction:
    """Predict ZeRO-1: each bucket is reduced after the last microbatch, gathered after the update.

    Whole gradients are there all the time: what a backward computes is added to them.
    """
    return _Replicated(model, case, scatters=False).prediction()


def zero2(model: nn.Module, case: Case) -> CollectivePrediction:
    """Predict ZeRO-2: each bucket is reduced in each backward, in a fixed order, used or not.

    It is whole from its first gradient on until its reduction is over.
    """
    return _Replicated(model, case, scatters=True).prediction()


class _Replicated:
    """Replay of ZeRO-1, or of ZeRO-2, which scatters each backward's gradients; without tensors."""

    def __init__(self, model: nn.Module, case: Case, *, scatters: bool) -> None:
        self.model, self.case, self.scatters = model, case, scatters
        self.flats = buckets(model, case)
        self.place = {name: n for n, flat in enumerate(self.flats) for name in flat.names}
        self.calls = Calls(case)
        self.live = self.calls.live
        self.events: dict[bool, list[UnitEvent]] = {}
        self.missing: list[int] = []
        self.in_flight: list[int] = []
        self.next = 0

    def prediction(self) -> CollectivePrediction:
        """Predict all steps.

        Memory is predicted only for the model of the case, and only in fp32, as its trace is in
        fp32.
        """
        calls, case = self.calls, self.case
        known = (
            case.model.user is None and is_of_case(self.model, case) and not reduced_precision(case)
        )
        reductions = case.training.microbatches if self.scatters else 1
        for number, flat in enumerate(self.flats):
            shards = case.axes.size("shard") if self.scatters else 1
            self.live.hold("gradient", number, flat.bytes // shards)
        for step in calls.steps:
            if known:
                self._hold(step)
            calls.at(step, "backward")
            for _ in range(reductions):
                self._each("reduce_scatter")
            averaging(calls, case, self.flats)
            scaling(calls, case)
            calls.at(step, "step")
            self.live.at(step, "step")
            clipping(calls, case)
            self._each("all_gather")
        return (
            calls.prediction(terms_of(case)) if known else CollectivePrediction(tuple(calls.done))
        )

    def _each(self, kind: str) -> None:
        for flat in self.flats:
            dtype = flat.reduced if kind == "reduce_scatter" else flat.dtype
            self.calls.add(kind, flat.elements, dtype)

    def _hold(self, step: int) -> None:
        """Replay the memory held in the forwards and backwards of a step."""
        late = self.case.training.unfreeze
        over = late is not None and step >= late
        if over not in self.events:
            self.events[over] = trace(self.case, lambda _: (), step=step)
        for number in range(self.case.training.microbatches):
            last = number == self.case.training.microbatches - 1
            self.calls.at(step, "forward")
            self.missing, self.next = [len(flat.names) for flat in self.flats], 0
            for event in self.calls.follow(self.events[over], last=last):
                if event.what == "parameter":
                    self._arrived(event)
            if self.scatters:
                self._flush()

    def _arrived(self, event: UnitEvent) -> None:
        """Copy a new gradient into its bucket, or add it to the one there."""
        place = self.place[event.name]
        if self.scatters:
            self.live.hold("bucket", place, self.flats[place].bytes)
        self.live.added(event.bytes)
        self.missing[place] -= 1
        while self.scatters and self.next < len(self.flats) and not self.missing[self.next]:
            self._launch()

    def _launch(self) -> None:
        """Reduce the next bucket, once few enough reductions are in flight."""
        self.live.hold("bucket", self.next, self.flats[self.next].bytes)
        while len(self.in_flight) >= DEPTH:
            self.live.free("bucket", self.in_flight.pop(0))
        self.in_flight.append(self.next)
        self.next += 1

    def _flush(self) -> None:
        while self.next < len(self.flats):
            self._launch()
        while self.in_flight:
            self.live.free("bucket", self.in_flight.pop(0))


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
