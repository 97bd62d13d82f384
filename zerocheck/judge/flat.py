"""Flat buffers of an implementation: parameters end to end, and the owner of each element.

Only the diagnosis needs it: to ask whether a shard stands where that of another rank belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..protocol.observations import Lie, RankObservation
from . import vectors
from .layout import ParameterLayout
from .pieces import split

NOBODY = -1
"""The element of a buffer that belongs to no parameter: padding."""


class FlatBuffer(NamedTuple):
    """Flat buffer, split into one shard of equal size per rank.

    shards: (ranks, elements of a shard) int64, the position of each element in the flat vector of
    the layout, NOBODY for padding; whole: every rank holds all of it, and updates its shard.
    """

    shards: torch.Tensor
    whole: bool

    @property
    def elements(self) -> torch.Tensor:
        """Buffer from end to end, 1-D."""
        return self.shards.reshape(-1)

    def starts(self, layout: ParameterLayout) -> list[tuple[str, int]]:
        """Return (name, offset in the buffer) of the parameters in it, in their order."""
        names = {place.start: place.name for place in layout.places if place.stop > place.start}
        first = torch.zeros(layout.size, dtype=torch.bool)
        first[list(names)] = True
        found: dict[str, int] = {}
        for part in split(len(self.elements)):
            elements = self.elements[part]
            for at in ((elements != NOBODY) & first[elements]).nonzero().reshape(-1).tolist():
                found[names[int(elements[at])]] = part.start + at
        return sorted(found.items(), key=lambda pair: pair[1])


def flat_buffers(
    observations: Sequence[RankObservation], layout: ParameterLayout
) -> list[FlatBuffer]:
    """Find the buffers that hold parameters, from the shards exposed before the first step.

    A buffer that is not cut in equal shards has no part in it: nothing could change places.
    """
    ranks = [_by_storage(one.memory) for one in observations]
    if len({len(rank) for rank in ranks}) != 1:
        return []
    found = []
    for lies in zip(*ranks, strict=True):
        sizes = {one.numel for rank in lies for one in rank}
        if len(sizes) != 1:
            continue
        size = sizes.pop()
        if all(rank == lies[0] for rank in lies):
            if size % len(ranks) == 0:
                shards = _elements(lies[:1], size, layout).view(len(ranks), -1)
                found.append(FlatBuffer(shards, True))
        else:
            found.append(FlatBuffer(_elements(lies, size, layout), False))
    return found


def _by_storage(memory: Sequence[Lie]) -> list[tuple[Lie, ...]]:
    storages: dict[int, list[Lie]] = {}
    for one in memory:
        storages.setdefault(one.storage, []).append(one)
    return [tuple(storages[number]) for number in sorted(storages)]


def _elements(ranks: Sequence[Sequence[Lie]], size: int, layout: ParameterLayout) -> torch.Tensor:
    """Return the flat positions of all elements of one storage: (ranks, size)."""
    elements = vectors.empty(len(ranks), size, dtype=torch.int64).fill_(NOBODY)
    for row, lies in zip(elements, ranks, strict=True):
        for one in lies:
            place = None if one.padding else layout.by_name.get(one.name)
            if place is not None:
                count = one.stop - one.start
                start = place.start + one.start
                torch.arange(start, start + count, out=row[one.offset : one.offset + count])
    return elements
