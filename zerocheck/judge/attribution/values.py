"""Values by bit pattern: named vectors, and the places where they have given bits.

A value is evidence only as far as it has significant bits: one that is 0, 1 or a power of two
occurs by chance, one of 24 bits does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by the bytes of an element."""
_FRACTIONS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}
"""Bits of the fraction of each format."""
MOST_PLACES = 8
"""Places of one value that are looked at: of a value with more, its neighbours decide."""

ENOUGH = 10.0
"""Bits of evidence for a hypothesis that was chosen to fit: one in a thousand fits by chance."""


class Source(NamedTuple):
    """Named flat vector in which values are looked up."""

    one: str
    """Name in sentences about one thing: "the saved one", "exp_avg_sq"."""
    many: str
    """Name in sentences about several: "the saved ones"."""
    vector: torch.Tensor


class Origin(NamedTuple):
    """Hypothesis on wrong values: a vector that they may be, and the words for it."""

    one: str
    """Predicate of one subject: "is 0", "is that of step 1"."""
    many: str
    """Predicate of several subjects: "are 0"."""
    vector: Callable[[torch.Tensor], torch.Tensor]
    """Values at these positions of the flat vector, (n,) int64 -> (n,)."""
    known: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Mask of the positions at which it has a value; None: at all of them."""
    level: int = 0
    """Complexity: of two that explain the same elements the lower one counts."""
    cost: float = 0.0
    """Bits that were chosen so that it fits. Values must have more of them to be evidence."""
    each: float = 0.0
    """Bits that were chosen for each element."""
    share: float = 0.0
    """Least share of the elements left that it must explain: others fit by chance."""
    key: object = None
    """Alternatives with equal keys are one."""
    partner: str = ""
    """Name of the other tensor, of one that holds another tensor's values."""


def bits(vector: torch.Tensor) -> torch.Tensor:
    """Return the bit patterns of a vector as integers."""
    if not vector.is_floating_point():
        return vector.to(torch.int64)
    return vector.contiguous().view(_INTEGERS[vector.element_size()])


def significant(vector: torch.Tensor) -> torch.Tensor:
    """Return the significant bits of each value: 0 for 0, infinities and NaN; 1 for powers of 2."""
    fraction = _FRACTIONS.get(vector.dtype)
    if fraction is None:
        return (vector != 0).to(torch.int64)
    mantissa = (bits(vector).to(torch.int64) & ((1 << fraction) - 1)) | (1 << fraction)
    trailing = (mantissa & -mantissa).to(torch.float64).log2().to(torch.int64)
    counted = vector.isfinite() & (vector != 0)
    return torch.where(counted, fraction + 1 - trailing, 0)


def evidence(values: torch.Tensor, cost: float, each: float = 0.0) -> float:
    """Return the bits by which values that fit exceed what was chosen. Each value counts once."""
    distinct = torch.unique(bits(values))
    if not len(distinct):
        return -cost
    back = distinct.view(values.dtype) if values.is_floating_point() else distinct
    return float((significant(back).to(torch.float64) - each).clamp(min=0.0).sum()) - cost


class ValueIndex:
    """Sorted index of the values at some positions, to find them in other vectors."""

    def __init__(self, values: torch.Tensor, positions: torch.Tensor) -> None:
        """Index values, but for those without evidence. positions: of each in its flat vector."""
        kept = significant(values) > 1
        ordered, order = bits(values[kept]).sort()
        self._values, self._positions = ordered, positions[kept][order]

    def __len__(self) -> int:
        return len(self._values)

    def pairs(self, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return equal values: (positions in the index, positions in the vector).

        Values with more than MOST_PLACES places on either side are left out.
        """
        none = torch.empty(0, dtype=torch.int64)
        if not len(self._values):
            return none, none
        found = bits(vector)
        low = torch.searchsorted(self._values, found)
        inside = low < len(self._values)
        inside &= self._values[low.clamp(max=len(self._values) - 1)] == found
        there = inside.nonzero().reshape(-1)
        low, found = low[there], found[there]
        count = torch.searchsorted(self._values, found, right=True) - low
        _, inverse, times = torch.unique(low, return_inverse=True, return_counts=True)
        few = (count <= MOST_PLACES) & (times[inverse] <= MOST_PLACES)
        there, low, count = there[few], low[few], count[few]
        into = torch.repeat_interleave(there, count)
        first = torch.repeat_interleave(low - (count.cumsum(0) - count), count)
        return self._positions[first + torch.arange(len(into))], into


def in_place(
    one: str, many: str, vector: torch.Tensor, *, level: int = 0, cost: float = 0.0
) -> Origin:
    """Return the hypothesis that elements are those of a vector at their own places."""
    return Origin(one, many, lambda positions: vector[positions], level=level, cost=cost)


def choices(count: int) -> float:
    """Return the bits of a choice among `count`."""
    return math.log2(max(count, 1))
