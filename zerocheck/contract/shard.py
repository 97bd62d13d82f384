"""Local view of a tensor, with its location in the whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..case.schema import RESERVED

Role = str
"""One of OF_NO_STATE, or the name of an optimizer state of the parameter's shape: "exp_avg"."""

OF_NO_STATE = RESERVED
"""Roles of all that is no such state."""

Index = tuple[slice, ...] | slice
"""`full[index]`, or, for one slice, `full.reshape(-1)[index]` in row-major order."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of one tensor that one rank holds, without communication.

    name    of the unwrapped model (`named_parameters()`, tied alias deduplicated) or its buffer
    role    what it is for: see Role
    tensor  the local tensor, or None for a gradient that does not exist; the harness copies it
    shape   the global shape, in elements
    index   where the tensor lies in the global one: a tuple of slices, one per dim, or one slice
            of the flattened tensor; None for the whole. Slices have no step.

    The indexed shape equals tensor.shape (a flat slice: the number of elements). What is not one
    range is several shards. Role `padding` is memory that belongs to no tensor; `step` is a 0-d
    tensor that counts optimizer steps of its parameter.
    """

    name: str
    role: Role
    tensor: torch.Tensor | None
    shape: tuple[int, ...]
    index: Index | None = None

    def flat_range(self) -> tuple[int, int] | None:
        """Return (start, stop) in row-major elements of the whole, or None if not one range."""
        numel = 1
        for size in self.shape:
            numel *= size
        if self.index is None:
            return 0, numel
        if isinstance(self.index, slice):
            start, stop, _ = self.index.indices(numel)
            return start, max(start, stop)
        inner = numel
        start = 0
        ranged = False
        for size, part in zip(self.shape, self.index, strict=True):
            inner = inner // size if size else 0
            low, high, _ = part.indices(size)
            if ranged and (low, high) != (0, size):
                return None
            if not ranged and high - low != 1:
                ranged = True
                start, stop = start + low * inner, start + max(low, high) * inner
            elif not ranged:
                start += low * inner
        if not ranged:
            stop = start + (1 if numel else 0)
        return start, stop
