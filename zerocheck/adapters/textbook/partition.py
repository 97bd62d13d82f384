"""Flat partition: parameters end to end, split into one equal shard per rank.

Section 5 of the ZeRO paper partitions a flat buffer and not tensors, so that ranks hold the same
number of elements whatever the shapes are. Pure arithmetic, no tensors.

    parameters   |aaaaaaa.|bb......|cccccccccc|..      . is padding
    shards, W=3  | rank 0    | rank 1    | rank 2|
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 16
"""Parameters start at multiples of this many elements: 64 bytes in fp32. Elsewhere: `aligned`.

A matrix kernel chooses its path by the address. At the alignment that torch's own allocations have
the local gradients are those of a single device bit for bit.
"""


def aligned(itemsize: int) -> int:
    """Number of elements of `itemsize` bytes in the 64 bytes that shards are aligned to."""
    return ALIGNMENT * 4 // itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of one parameter that one rank owns.

    Elements `start` to `stop` of the parameter in row-major order, stored at `offset` (elements) in
    the rank's shard. `shape` is the global shape.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int

    @property
    def inside(self) -> slice:
        """Location of the piece in the rank's shard."""
        return slice(self.offset, self.offset + self.stop - self.start)

    @property
    def index(self) -> slice:
        """Location of the piece in its flattened parameter."""
        return slice(self.start, self.stop)


class Partition:
    """Places of parameters in a flat buffer of `numel` elements, split into W equal shards.

    The world size need not divide anything: the end is padded to a multiple of it. A rank may own
    all of a parameter, a part of it, nothing of it, or nothing but padding.

    With `whole` a rank owns all of a parameter, or nothing of it, as an optimizer of matrices needs
    it. Then shards are as long as the longest, and padding is between them.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[str, tuple[int, ...]]],
        world_size: int,
        alignment: int = ALIGNMENT,
        *,
        whole: bool = False,
    ) -> None:
        self.shapes = list(shapes)
        self.world_size = world_size
        self.offsets: list[int] = []
        if whole:
            self._place_whole(alignment)
            return
        end = 0
        for _, shape in self.shapes:
            start = -(-end // alignment) * alignment
            self.offsets.append(start)
            end = start + math.prod(shape)
        self.shard_size = -(-end // world_size)
        self.numel = self.shard_size * world_size

    def _place_whole(self, alignment: int) -> None:
        """Give each parameter to one rank, the most expensive first, to the rank with least work.

        Work is that of X X^T X, which Newton-Schulz repeats: elements times the shorter dim.
        """
        owners = [0] * len(self.shapes)
        work, ends = [0] * self.world_size, [0] * self.world_size
        costs = [math.prod(shape) * min(shape, default=1) for _, shape in self.shapes]
        for number in sorted(range(len(costs)), key=lambda one: -costs[one]):
            owner = owners[number] = work.index(min(work))
            work[owner] += costs[number]
        starts = []
        for owner, (_, shape) in zip(owners, self.shapes, strict=True):
            starts.append(ends[owner])
            ends[owner] += -(-math.prod(shape) // alignment) * alignment
        self.shard_size = max(ends, default=0)
        self.numel = self.shard_size * self.world_size
        self.offsets = [
            owner * self.shard_size + start for owner, start in zip(owners, starts, strict=True)
        ]

    def shard(self, rank: int) -> slice:
        """Return the location of a rank's shard in the flat buffer."""
        return slice(rank * self.shard_size, (rank + 1) * self.shard_size)

    def pieces(self, rank: int) -> list[Piece]:
        """Return the pieces that `rank` owns, in flat order, for parameters of which it owns any.

        A parameter without elements belongs to the rank in whose shard its place is.
        """
        mine = self.shard(rank)
        pieces = []
        for (name, shape), offset in zip(self.shapes, self.offsets, strict=True):
            low = max(offset, mine.start)
            high = min(offset + math.prod(shape), mine.stop)
            if low < high:
                pieces.append(Piece(name, shape, low - offset, high - offset, low - mine.start))
            elif 0 in shape and rank == self._owner(offset):
                pieces.append(Piece(name, shape, 0, 0, low - mine.start))
        return pieces

    def _owner(self, offset: int) -> int:
        """Return the rank whose shard has this element of the flat buffer; its end: the last."""
        return min(offset // self.shard_size, self.world_size - 1) if self.shard_size else 0

    def padding(self, start: int, stop: int) -> list[slice]:
        """Return the ranges of the flat buffer between `start` and `stop` that are padding."""
        gaps = []
        end = 0
        placed = zip(self.shapes, self.offsets, strict=True)
        for (_, shape), offset in sorted(placed, key=lambda one: one[1]):
            gaps.append((end, offset))
            end = offset + math.prod(shape)
        gaps.append((end, self.numel))
        cut = [slice(max(low, start), min(high, stop)) for low, high in gaps]
        return [gap for gap in cut if gap.start < gap.stop]


def split(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Group the indices of consecutive tensors into buckets of at most `limit` elements.

    A tensor that is larger than `limit` has a bucket of its own, but for empty ones after it; no
    tensor is cut.
    """
    buckets: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(index)
        room = max(0, room - size)
    return buckets
