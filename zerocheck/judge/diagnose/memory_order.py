"""A wrong gradient of parameters that are not contiguous: elements in the order of memory.

Code that flattens a gradient by its memory, and reads it by its index (or the other way round),
permutes the elements of every parameter that is stored transposed, and of no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ..bounds import Enclosure
from ..layout import Layout
from ..pieces import Enclosing, Positions, some
from .evidence import Candidate, Evidence, enclosing, slack, summed

IN_MEMORY_ORDER = "elements in memory order"
SENTENCE = (
    "the elements of parameters that are not contiguous are in the order of memory, and are read "
    "in the order of indices, or the other way round"
)


def candidates(evidence: Evidence, others: Iterable[Candidate] = ()) -> Iterator[Candidate]:
    """The right gradient, and what other causes give, with elements in the order of memory.

    None where every parameter is contiguous. others: causes that may have come first.
    """
    orders = orders_of(evidence.layout)
    if not orders:
        return
    for order in orders:
        yield Candidate(IN_MEMORY_ORDER, SENTENCE, [_reordered(evidence, evidence.right, order)])
        if evidence.passes.gradients.shape[1] > 1:
            yield Candidate(
                f"first microbatch, {IN_MEMORY_ORDER}",
                f"of the first microbatch, {SENTENCE}",
                [_first_reordered(evidence, order)],
            )
    for other in others:
        for order in orders:
            yield Candidate(
                f"{other.name}, {IN_MEMORY_ORDER}",
                f"{other.sentence}; and {SENTENCE}",
                [_reordered(evidence, one, order) for one in other.enclosures],
            )


def _first_reordered(evidence: Evidence, order: torch.Tensor) -> Enclosing:
    """The sum of the first microbatch, reordered, and of the others as they are."""
    first = summed(evidence, lambda terms: terms[:, 0], evidence.divisor)
    others = summed(evidence, lambda terms: terms[:, 1:], evidence.divisor)

    def at(positions: Positions | None) -> Enclosure:
        (one, off), (rest, rest_off) = first.at(some(order, positions)), others.at(positions)
        return Enclosure(
            one + rest, off + rest_off + slack(evidence, 1, one.abs() + rest.abs(), positions)
        )

    return enclosing(evidence, at)


def orders_of(layout: Layout) -> tuple[torch.Tensor, ...]:
    """From index to memory, and from memory to index; none where they are the same everywhere."""
    order = layout.memory_order
    return () if order is None else (order, order.argsort())


def _reordered(evidence: Evidence, of: Enclosing, order: torch.Tensor) -> Enclosing:
    def at(positions: Positions | None) -> Enclosure:
        return of.at(some(order, positions))

    return enclosing(evidence, at)
