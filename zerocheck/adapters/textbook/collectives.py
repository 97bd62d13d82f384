"""Collectives of the textbook ZeRO-1 and ZeRO-2, and the parts shared with ZeRO-3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from ...case.schema import Case
from ...case.traits import reduced_precision
from ...models.blocks import DTYPES
from ..shared.calls import SIZES, Calls, CollectivePrediction, dtype_name
from ..shared.live_memory import terms_of
from ..shared.trace import UnitEvent, is_of_case, trace
from .bucket import parts_of
from .flat import Named, needs_whole
from .partition import Partition, aligned
from .reduction import DEPTH


class FlatSpec(NamedTuple):
    """Flat buffer of parameters of one dtype, without tensors; see precision.py."""

    names: tuple[str, ...]
    partition: Partition
    dtype: str
    """Of what is computed with."""
    reduced: str
    """Of gradients."""
    updated: str
    """Of what the optimizer updates, and of its states."""
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
