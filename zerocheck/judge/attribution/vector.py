"""Provenance of the wrong elements of one flat vector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ..layout import ParameterLayout
from .cover import cover
from .facts import Fact, Facts
from .moved import Offsets, ShardOrders, StorageOrder, Tensors, elsewhere
from .places import Scope, where
from .transformed import solved, transformed
from .values import Origin, Source, ValueIndex, bits, in_place

MOST_ELEMENTS = 1 << 26
"""Elements of a vector up to which moved values are looked for: each look-up copies it."""


class Known(NamedTuple):
    """Vectors and places from which wrong values may come."""

    right: Source
    """Values that were due."""
    same_place: Sequence[Source] = ()
    """Other states of the role: predicates "is that of step 1" and "are those of step 1"."""
    roles: Sequence[Source] = ()
    """Other roles, by their names."""
    factors: Mapping[float, str] = {}
    """Factors that have a reason, with its words."""
    lines: Sequence[StorageOrder] = ()
    """Flat buffers of the implementation."""
    scopes: Sequence[Scope] = ()
    """Shards of ranks."""
    noun: str = "parameter"
    """Name of one tensor in sentences."""
    ranks: tuple[int, ...] = ()
    """Ranks that hold the vector; none where all hold one and the same."""


def provenance(
    role: str,
    observed: torch.Tensor,
    wrong: torch.Tensor,
    known: Known,
    layout: ParameterLayout,
    relevant: torch.Tensor | None = None,
) -> Facts:
    """Return facts on the origin of each wrong element of a flat vector.

    wrong: their mask; relevant: mask of the elements that count, None: all.
    """
    right = known.right
    vector_words = f"the flat vector of all {known.noun}s"
    whole = StorageOrder(vector_words, vector_words, [torch.arange(layout.size).view(1, -1)])
    every_tensor = [torch.arange(p.start, p.stop).view(1, -1) for p in layout.places]
    lines = (StorageOrder("its tensor", "their tensors", every_tensor), *known.lines, whole)

    def unmoved(sample: torch.Tensor) -> Iterator[Origin]:
        yield Origin("is NaN", "are NaN", lambda at: observed[at], _nan(observed), key="NaN")
        yield from transformed(right, known.factors)
        for source in distinct(known.same_place):
            yield in_place(source.one, source.many, source.vector)
        for source in known.roles:
            words = f"{source.one} of the same elements"
            yield in_place(f"holds {words}", f"hold {words}", source.vector)

    def moved(sample: torch.Tensor) -> Iterator[Origin]:
        tensors = Tensors(observed, layout)
        yield from tensors.transposed(right)
        for source in (right, *known.roles):
            yield from tensors.exchanged(source, sample)
        yield from ShardOrders(observed, sample).reordered(right, known.lines)

    def calculated(sample: torch.Tensor) -> Iterator[Origin]:
        yield from solved(observed, right, sample, layout.places)
        offsets = Offsets(observed, layout)
        index = ValueIndex(observed[sample], sample)
        for source in (right, *known.roles) if len(index) else ():
            yield from offsets.shifted(source, lines, index)
        if len(index):
            yield from offsets.strided(right, index)

    def scattered(sample: torch.Tensor) -> Iterator[Origin]:
        yield elsewhere(right, observed)

    small = layout.size <= MOST_ELEMENTS
    stages = (unmoved, moved, calculated, scattered) if small else (unmoved,)
    accounts, left = cover(observed, wrong, stages)
    every = torch.arange(layout.size)
    facts = []
    for origins, mask in accounts:
        made = bits(origins[0].vector(every))
        has = torch.ones_like(mask) if origins[0].known is None else origins[0].known(every)
        counts = torch.ones_like(mask) if relevant is None else relevant
        holds = (made == bits(observed)) & has | ~counts
        telling = (made != bits(right.vector)) & has & counts
        facts.append(
            Fact(
                role,
                where(mask, holds, telling, layout, known.scopes, noun=known.noun),
                ", or ".join(origin.one for origin in origins[:3]),
                ", or ".join(origin.many for origin in origins[:3]),
                int(torch.count_nonzero(mask)),
                known.ranks,
                origins[0].partner if len(origins) == 1 else "",
            )
        )
    count = int(torch.count_nonzero(wrong))
    return Facts(tuple(facts), int(torch.count_nonzero(left)), count)


def distinct(sources: Sequence[Source]) -> list[Source]:
    """Return the sources without those that are equal to one before them."""
    found: list[Source] = []
    for source in sources:
        if not any(torch.equal(bits(source.vector), bits(one.vector)) for one in found):
            found.append(source)
    return found


def _nan(observed: torch.Tensor):  # type: ignore[no-untyped-def]
    if not observed.is_floating_point():
        return lambda at: torch.zeros(len(at), dtype=torch.bool)
    return lambda at: observed[at].isnan()
