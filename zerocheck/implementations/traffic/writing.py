"""Writes down calls, in the words of `contract.layout.Call`."""

from __future__ import annotations

import msgspec
import torch

from ...case.schema import Case
from ...contract.layout import Call, Layout, Phase

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


class Calls:
    """The calls of one rank, which all ranks of the case take part in.

    steps: that are predicted: those of the case, and so many that all others are as the last one;
    step: where the next calls are, as `at` says.
    """

    def __init__(self, case: Case) -> None:
        training = case.training
        self.ranks = case.world_size
        self.steps = range(training.first, last_step(case) + 1)
        self.done: list[Call] = []
        self.step = -1
        self._phase: Phase = "forward"

    def at(self, step: int, phase: Phase) -> None:
        """The calls that are added from now on belong there."""
        self.step, self._phase = step, phase

    def add(self, kind: str, elements: int, dtype: str) -> None:
        """One more call, with a whole tensor of so many elements."""
        size = elements * SIZES[dtype]
        self.done.append(Call(kind, size, self.ranks, dtype, self._phase, self.step))


def dtype_of(tensor: torch.Tensor) -> str:
    """As `Call` spells it."""
    return str(tensor.dtype).removeprefix("torch.")


def last_step(case: Case) -> int:
    """Index of the last step that is predicted; all later ones are as this."""
    training = case.training
    changes = max(training.first, training.unfreeze or 0, training.overflow or 0)
    return max(training.steps, changes + SETTLES) - 1


def with_calls(held: Layout | None, calls: tuple[Call, ...] | None, case: Case) -> Layout | None:
    """A layout that tells of what is held, and of calls; None if nothing is known of either."""
    if calls is None:
        return held
    held = held or Layout(lines=())
    return msgspec.structs.replace(held, calls=calls, last=last_step(case))
