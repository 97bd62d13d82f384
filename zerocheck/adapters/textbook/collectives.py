"""Collectives of the textbook ZeRO-1 and ZeRO-2, and the parts shared with ZeRO-3."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from ...case.schema import Case
from ...case.shapes import unfrozen
from ...case.traits import reduced_precision
from ...models.blocks import DTYPES
from ..shared.calls import SIZES, Calls, CollectivePrediction, dtype_name
from ..shared.live_memory import terms_of
from ..shared.trace import UnitEvent, is_of_case, trace
from .flat import Named, alike, needs_whole
from .partition import Partition, aligned, split
from .reduction import DEPTH


class FlatSpec(NamedTuple):
    """Flat buffer: elements with padding, dtype, parameter names, and the gradients' dtype."""

    elements: int
    dtype: str
    names: tuple[str, ...]
    reduced: str

    @property
    def bytes(self) -> int:
        """Size of the whole buffer in bytes."""
        return self.elements * SIZES[self.dtype]


def flat_of(named: Named, case: Case) -> FlatSpec:
    """Return the flat buffer of parameters of one dtype."""
    first = named[0][1]
    shapes = [(name, tuple(parameter.shape)) for name, parameter in named]
    dtype = DTYPES[case.precision.compute] if reduced_precision(case) else first.dtype
    reduced = DTYPES[case.precision.reduce] if reduced_precision(case) else first.dtype
    ranks, whole = case.axes.size("shard"), needs_whole(named, case)
    numel = Partition(shapes, ranks, aligned(dtype.itemsize), whole=whole).numel
    names = tuple(name for name, _ in named)
    return FlatSpec(numel, dtype_name(dtype), names, dtype_name(reduced))


def buckets(model: nn.Module, case: Case) -> list[FlatSpec]:
    """Return the buckets of ZeRO-1 and ZeRO-2, in their order."""
    later = unfrozen(case)
    last_first = list(model.named_parameters())[::-1]
    learns = [pair for pair in last_first if pair[1].requires_grad or pair[0] in later]
    found = []
    for named in alike(learns, case):
        sizes = [math.prod(parameter.shape) for _, parameter in named]
        for part in split(sizes, case.sharding.bucket):
            found.append(flat_of([named[index] for index in part], case))
    return found


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
            size = flat.bytes // (case.axes.size("shard") if self.scatters else 1)
            self.live.hold("gradient", number, size)
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
