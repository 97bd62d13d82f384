"""Where the elements of a rank's shards lie in the flat vector, and what all ranks cover of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..protocol.observations import Entry
from . import vectors
from .compare import same_bits
from .layout import ParameterLayout
from .pieces import in_pieces

FEW = 1 << 10
"""Elements of a range, from which on it is worth a copy of its own."""


@dataclass(frozen=True)
class ManifestPlan:
    """Mapping of the elements of one manifest to positions in the flat vector.

    index: flat position of each element in order, or None if they are all positions in order.
    order: where the element of each position stands in what was recorded, if `index` is None and
    the shards came in another order, as those of several dtypes do. ranges: those of `index`, for
    many elements in a few of them, which is 2 to 8 times as fast as one by one.
    """

    index: torch.Tensor | None
    present: frozenset[str]
    absent: frozenset[str]
    order: torch.Tensor | None = None
    ranges: tuple[slice, ...] = ()

    def scatter(self, into: torch.Tensor, data: torch.Tensor) -> None:
        """Write a rank's data into the whole."""
        if self.index is None:
            into.copy_(data)
        elif self.ranges:
            for here, part in self._parts(data):
                into[here] = part
        else:
            into[self.index] = data

    def gather(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of the whole vector that this manifest covers, in its order."""
        if self.index is None:
            return whole
        if not self.ranges:
            return vectors.taken(whole, self.index)
        found = vectors.empty(len(self.index), dtype=whole.dtype)
        for here, part in self._parts(found):
            part.copy_(whole[here])
        return found

    def agrees(self, whole: torch.Tensor, data: torch.Tensor) -> bool:
        """Return True if a rank's data has the bits of the whole vector where it lies."""
        if self.ranges:
            return all(same_bits(part, whole[here]) for here, part in self._parts(data))
        return data is whole or same_bits(data, self.gather(whole))

    def mark(self, mask: torch.Tensor) -> None:
        """Set a mask where the manifest has elements; an index of None takes all."""
        for here in self.ranges or (self.index,):
            mask[here] = True

    def _parts(self, data: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        sizes = [here.stop - here.start for here in self.ranges]
        return zip(self.ranges, torch.split(data, sizes), strict=True)


@dataclass(frozen=True)
class Cover:
    """The elements that some rank holds.

    mask: (size,) of bool, or None for all elements; once: no two ranks hold the same element.
    """

    mask: torch.Tensor | None
    once: bool


def cover_of(plans: Sequence[ManifestPlan], size: int) -> Cover:
    """Return what all ranks hold together of a flat vector of `size` elements."""
    if any(plan.index is None for plan in plans):
        return Cover(None, len(plans) == 1)
    mask = torch.zeros(size, dtype=torch.bool)
    for plan in plans:
        plan.mark(mask)
    held = int(torch.count_nonzero(mask))
    every = sum(len(plan.index) for plan in plans if plan.index is not None)
    return Cover(None if held == size else mask, every == held)


def _in_order(manifest: tuple[Entry, ...], layout: ParameterLayout) -> bool:
    """Return True if these are all elements of the flat vector, in order."""
    end = 0
    for entry in manifest:
        if entry.present:
            place = layout.by_name[entry.name]
            cut = entry.box is not None and entry.stop < place.stop - place.start
            if cut or place.start + entry.start != end:
                return False
            end += entry.stop - entry.start
    return end == layout.size


def plan_of(manifest: tuple[Entry, ...], layout: ParameterLayout) -> ManifestPlan:
    """Map the entries of a manifest to the flat vector.

    Raises KeyError for names that the model does not have: left out, they would shift all others.
    Ownership reports them first.
    """
    present = frozenset(entry.name for entry in manifest if entry.present)
    missing = frozenset(entry.name for entry in manifest) - present
    if _in_order(manifest, layout):
        return ManifestPlan(None, present, missing)
    entries = [entry for entry in manifest if entry.present]
    starts = [layout.by_name[entry.name].start + entry.start for entry in entries]
    counts = [entry.stop - entry.start for entry in entries]
    boxed = any(entry.box is not None for entry in entries)
    if not boxed and _tiles(starts, counts, layout.size):
        # All elements, but the shards came in another order.
        first = [0, *accumulate(counts)]
        turn = sorted(range(len(starts)), key=starts.__getitem__)
        order = vectors.ranges([first[n] for n in turn], [counts[n] for n in turn])
        return ManifestPlan(None, present, missing, order)
    if not boxed:
        index = vectors.ranges(starts, counts)
        large = in_pieces(None, len(index)) and len(index) > FEW * len(starts)
        there = tuple(slice(start, start + n) for start, n in zip(starts, counts, strict=True))
        return ManifestPlan(index, present, missing, ranges=there if large else ())
    parts: list[torch.Tensor] = []
    for entry, start in zip(entries, starts, strict=True):
        place = layout.by_name[entry.name]
        if entry.box is None:
            parts.append(torch.arange(start, start + entry.stop - entry.start))
        else:
            positions = torch.arange(place.start, place.stop).view(entry.shape)
            parts.append(positions[tuple(slice(*part) for part in entry.box)].reshape(-1))
    index = vectors.joined(parts)
    if len(index) != layout.size:
        return ManifestPlan(index, present, missing)
    positions, order = index.sort()
    every = torch.equal(positions, torch.arange(layout.size))
    return ManifestPlan(None if every else index, present, missing, order if every else None)


def _tiles(starts: Sequence[int], counts: Sequence[int], size: int) -> bool:
    """Return True if these ranges, in some order, cover [0, size), each element once."""
    end = 0
    for start, count in sorted((s, c) for s, c in zip(starts, counts, strict=True) if c):
        if start != end:
            return False
        end += count
    return end == size
