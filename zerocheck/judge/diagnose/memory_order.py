"""Causes of a wrong gradient of non-contiguous parameters: elements in the order of memory.

Code that flattens a gradient by its memory, and reads it by its index (or the other way round),
permutes the elements of every parameter that is stored transposed, and of no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ... import causes as bugs
from ...floating_point import Enclosure
from ..layout import ParameterLayout
from ..pieces import Enclosing, Positions, some
from .evidence import Candidate, Evidence, enclosed_sum, enclosing, slack

SENTENCE = (
    "the elements of parameters that are not contiguous are in the order of memory, and are read "
    "in the order of indices, or the other way round"
)


def candidates(evidence: Evidence, others: Iterable[Candidate] = ()) -> Iterator[Candidate]:
    """Iterate over the right gradient and other causes' gradients, reordered as in memory.

    None where every parameter is contiguous. others: causes that may have come first.
    """
    orders = orders_of(evidence.layout)
    if not orders:
        return
    for order in orders:
        yield Candidate(
            bugs.ELEMENTS_IN_MEMORY_ORDER, SENTENCE, [_reordered(evidence, evidence.right, order)]
        )
        if evidence.passes.gradients.shape[1] > 1:
            yield Candidate(
                bugs.AND_IN_MEMORY_ORDER(what="first microbatch"),
                f"of the first microbatch, {SENTENCE}",
                [_accumulated(evidence, order, again=False)],
            )
            yield Candidate(
                bugs.AND_IN_MEMORY_ORDER(what="accumulated gradient"),
                f"of the sum so far, again with each microbatch, {SENTENCE}",
                [_accumulated(evidence, order, again=True)],
            )
    for other in others:
        for order in orders:
            yield Candidate(
                bugs.AND_IN_MEMORY_ORDER(what=other.name),
                f"{other.sentence}; and {SENTENCE}",
                [_reordered(evidence, one, order) for one in other.enclosures],
            )


def _accumulated(evidence: Evidence, order: torch.Tensor, *, again: bool) -> Enclosing:
    """Sum of the microbatches, reordered after the first one, or (again) after each of them."""
    count = evidence.passes.gradients.shape[1]
    total = _reordered(evidence, _of_microbatch(evidence, 0), order)
    for number in range(1, count):
        total = _added(evidence, total, _of_microbatch(evidence, number))
        if again:
            total = _reordered(evidence, total, order)
    return total


def _of_microbatch(evidence: Evidence, number: int) -> Enclosing:
    return enclosed_sum(evidence, lambda terms: terms[:, number], evidence.divisor)


def _added(evidence: Evidence, first: Enclosing, second: Enclosing) -> Enclosing:
    def at(positions: Positions | None) -> Enclosure:
        (one, bound), (other, other_bound) = first.at(positions), second.at(positions)
        rounded = slack(evidence, 1, one.abs() + other.abs(), positions)
        return Enclosure(one + other, bound + other_bound + rounded)

    return enclosing(evidence, at)


def orders_of(layout: ParameterLayout) -> tuple[torch.Tensor, ...]:
    """Return the orders from index to memory and back; none where both are the same everywhere."""
    order = layout.memory_order
    return () if order is None else (order, order.argsort())


def _reordered(evidence: Evidence, of: Enclosing, order: torch.Tensor) -> Enclosing:
    def at(positions: Positions | None) -> Enclosure:
        return of.at(some(order, positions))

    return enclosing(evidence, at)
