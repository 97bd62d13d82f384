"""Writes down calls, in the words of `contract.layout.Call`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import msgspec
import torch

from ...case.schema import Case
from ...contract.layout import Call, Highest, Layout, Phase, Term
from .passage import Event
from .window import Window

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


class Told(NamedTuple):
    """What is told of the steps: their calls, and the most that is held within their phases, or
    None if that is not predicted."""

    calls: tuple[Call, ...]
    highest: tuple[Highest, ...] | None = None


class Calls:
    """The calls of one rank, which all ranks of the case take part in.

    steps: that are predicted: those of the case, and so many that all others are as the last one;
    step: where the next calls are, as `at` says.
    """

    def __init__(self, case: Case) -> None:
        training = case.training
        self.ranks, self.replicas = case.shards, case.replicas
        self.steps = range(training.first, last_step(case) + 1)
        self.done: list[Call] = []
        self.step = -1
        self.window = Window()
        self._phase: Phase = "forward"

    def at(self, step: int, phase: Phase) -> None:
        """The calls that are added from now on belong there."""
        self.step, self._phase = step, phase

    def follow(self, events: Iterable[Event], *, last: bool) -> Iterator[Event]:
        """The events of a microbatch, with the window at each. last: of its step."""
        self.window.at(self.step, "forward")
        for event in events:
            self.window.own(event.own)
            if event.what == "loss":
                self.at(self.step, "backward")
                if last:
                    self.window.at(self.step, "backward")
            yield event

    def add(self, kind: str, elements: int, dtype: str) -> None:
        """One more call over the ranks of a replica, with a whole tensor of so many elements."""
        size = elements * SIZES[dtype]
        self.done.append(Call(kind, size, self.ranks, dtype, self._phase, self.step))

    def over_replicas(self, elements: int, dtype: str) -> None:
        """An all-reduce over the ranks that hold the same shards."""
        size = elements * SIZES[dtype]
        self.done.append(Call("all_reduce", size, self.replicas, dtype, self._phase, self.step))

    def told(self, terms: Collection[Term]) -> Told:
        """The calls, and the most of these terms."""
        return Told(tuple(self.done), self.window.highest(terms))


def dtype_of(tensor: torch.Tensor) -> str:
    """As `Call` spells it."""
    return dtype_name(tensor.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """The same of a dtype."""
    return str(dtype).removeprefix("torch.")


def last_step(case: Case) -> int:
    """Index of the last step that is predicted; all later ones are as this."""
    training = case.training
    changes = max(training.first, training.unfreeze or 0, training.overflow or 0)
    return max(training.steps, changes + SETTLES) - 1


def with_told(held: Layout | None, told: Told | None, case: Case) -> Layout | None:
    """A layout that tells of what is held, and of the steps; None if nothing is known of either."""
    if told is None:
        return held
    held = held or Layout(lines=())
    return msgspec.structs.replace(
        held, calls=told.calls, highest=told.highest, last=last_step(case)
    )
