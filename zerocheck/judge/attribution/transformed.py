"""Transformed forms of the right values: 0, rounded, truncated, scaled, offset or negated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ..layout import ParameterPlace
from .values import Origin, Source, in_place

SOLVED = 34.0
"""Bits that a solved factor or offset may take from the values: one element gives it."""
MOST_SOLVED = 6
"""Solved factors, and offsets, that are tried: those of so many tensors."""


def transformed(right: Source, factors: Mapping[float, str]) -> Iterator[Origin]:
    """Iterate over known forms of the right values. factors: each with its words."""
    vector = right.vector
    yield Origin("is 0", "are 0", lambda at: torch.zeros(len(at), dtype=vector.dtype), key="0")
    if not vector.is_floating_point():
        return

    def form(words: str, made: torch.Tensor) -> Origin:
        return in_place(f"is {right.one} {words}", f"are {right.many} {words}", made)

    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        yield form(f"rounded to {name}", vector.to(dtype).to(vector.dtype))
    if vector.dtype == torch.float32:
        cut = (vector.contiguous().view(torch.int32) & -65536).view(torch.float32)
        yield form("truncated to bf16", cut)
    yield form("negated", -vector)
    for factor, words in factors.items():
        yield form(f"times {factor:g} ({words})", vector * factor)
        yield form(f"divided by {factor:g} ({words})", vector / factor)


def solved(
    observed: torch.Tensor, right: Source, wrong: torch.Tensor, places: Sequence[ParameterPlace]
) -> Iterator[Origin]:
    """Iterate over the right values times a factor, or plus an offset, as wrong elements give it.

    wrong: positions of some of them; places: tensors, of which each may have its own.
    """
    vector = right.vector
    if not vector.is_floating_point():
        return
    factors: dict[float, None] = {}
    offsets: dict[float, None] = {}
    for place in places:
        inside = wrong[(wrong >= place.start) & (wrong < place.stop)]
        if len(factors) >= MOST_SOLVED or not len(inside):
            continue
        seen, due = (one[inside].to(torch.float64) for one in (observed, vector))
        ratio, difference = seen / due, seen - due
        for values, found in ((ratio, factors), (difference, offsets)):
            finite = values[values.isfinite() & (values != 0)]
            if len(finite):
                found[float(f"{float(finite.median()):.5g}")] = None
    for factor in factors:
        if factor not in (0.0, 1.0, -1.0):
            yield in_place(
                f"is {right.one} times {factor:g}",
                f"are {right.many} times {factor:g}",
                (vector.to(torch.float64) * factor).to(vector.dtype),
                cost=SOLVED,
            )
    for offset in offsets:
        sign, size = ("plus", offset) if offset > 0 else ("minus", -offset)
        yield in_place(
            f"is {right.one} {sign} {size:g}",
            f"are {right.many} {sign} {size:g}",
            (vector.to(torch.float64) + offset).to(vector.dtype),
            cost=SOLVED,
        )
