"""Recording of predicted calls as `protocol.layout.Call`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import msgspec
import torch

from ...case.schema import Case
from ...protocol.layout import Call, Highest, Layout, Phase, Term
from .live_memory import LiveMemory
from .trace import UnitEvent

SIZES = {
    str(kind).removeprefix("torch."): kind.itemsize
    for kind in vars(torch).values()
    if isinstance(kind, torch.dtype)
}
"""Bytes of an element: buffers have any dtype, a mask is of booleans."""

SETTLES = 4
"""Steps until all others are alike, after the first, one that overflows or one that unfreezes. DDP
of a static graph takes the longest: the graph is recorded, the order of gradients is noted, buckets
are made anew."""


class CollectivePrediction(NamedTuple):
    """Prediction of the steps: their calls, and the maximum of memory held within their phases.

    highest is None if memory is not predicted.
    """

    calls: tuple[Call, ...]
    highest: tuple[Highest, ...] | None = None


class Calls:
    """Predicted calls of one rank, in which all ranks of the case take part.

    steps: the predicted steps, those of the case and so many that all later ones equal the last;
    step: the place of the next calls, set by `at`.
    """

    def __init__(self, case: Case) -> None:
        training = case.training
        self.ranks, self.replicas = case.axes.size("shard"), case.axes.size("replicate")
        self.steps = range(training.first, last_step(case) + 1)
        self.done: list[Call] = []
        self.step = -1
        self.live = LiveMemory()
        self._phase: Phase = "forward"

    def at(self, step: int, phase: Phase) -> None:
        """Set the step and phase of the calls that are added next."""
        self.step, self._phase = step, phase

    def follow(self, events: Iterable[UnitEvent], *, last: bool) -> Iterator[UnitEvent]:
        """Iterate over the events of a microbatch, updating the live memory. last: of its step."""
        self.live.at(self.step, "forward")
        for event in events:
            self.live.of_model(event.model)
            if event.what == "loss":
                self.at(self.step, "backward")
                if last:
                    self.live.at(self.step, "backward")
            yield event

    def add(self, kind: str, elements: int, dtype: str) -> None:
        """Add a call over the ranks of a replica, with a whole tensor of `elements` elements."""
        size = elements * SIZES[dtype]
        self.done.append(Call(kind, size, self.ranks, dtype, self._phase, self.step))

    def over_replicas(self, elements: int, dtype: str) -> None:
        """Add an all-reduce over the ranks that hold the same shards."""
        size = elements * SIZES[dtype]
        self.done.append(Call("all_reduce", size, self.replicas, dtype, self._phase, self.step))

    def prediction(self, terms: Collection[Term]) -> CollectivePrediction:
        """Return the calls, and the maximum of these terms."""
        return CollectivePrediction(tuple(self.done), self.live.highest(terms))


def dtype_of(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype as used in `Call`."""
    return dtype_name(tensor.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as used in `Call`."""
    return str(dtype).removeprefix("torch.")


def last_step(case: Case) -> int:
    """Return the index of the last predicted step; all later ones are equal to it."""
    training = case.training
    changes = max(training.first, training.unfreeze or 0, training.overflow or 0)
    return max(training.steps, changes + SETTLES) - 1


def with_collectives(
    held: Layout | None, prediction: CollectivePrediction | None, case: Case
) -> Layout | None:
    """Add predicted calls and live memory to a layout; None if nothing is predicted."""
    if prediction is None:
        return held
    held = held or Layout(lines=())
    return msgspec.structs.replace(
        held, calls=prediction.calls, highest=prediction.highest, last=last_step(case)
    )
