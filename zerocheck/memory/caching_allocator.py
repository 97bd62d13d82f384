"""Model of the caching allocator of CUDA tensors: which memory it takes from the driver, and keeps.

The rules are those of c10/cuda/CUDACachingAllocator.cpp in torch 2.11.0, without settings or with
`expandable_segments:True`:

- A size is rounded up to a multiple of 512 bytes. Up to 1 MiB it comes from the small pool.
- Memory comes from the driver in segments of one stream and pool: 2 MiB for the small pool; 20 MiB
  for less than 10 MiB; else the size itself, rounded up to a multiple of 2 MiB.
- The smallest free block that is large enough is taken, of equal ones that with the lowest address.
  It is split where 512 bytes are left in the small pool, or more than 1 MiB in the large one.
- A block that is freed merges with free neighbours of its segment. No segment goes back.
- Expandable: one segment for each stream and pool, which grows at its end by pages of 2 MiB, in the
  large pool 20 MiB. A block that could still grow counts as large as the segment can become.

Not modelled: what happens where the device is full (caches are given back, and it is tried again),
other settings, and CUDA graphs. tests/memory replays what an H100 did.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

MIB = 1 << 20
ROUNDING = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
SPACE = 1 << 50
"""Addresses for a segment that may grow."""
OWN_SEGMENT = 10 * MIB
"""From here on a block has a segment of its own size."""


class DeviceBlock:
    """Block of a segment, in bytes. `before`, `behind`: its neighbours in the segment."""

    __slots__ = ("address", "before", "behind", "free", "pool", "size")

    def __init__(self, address: int, size: int, pool: tuple[int, bool]) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.before: DeviceBlock | None = None
        self.behind: DeviceBlock | None = None
        self.free = False


class CachingAllocator:
    """Allocator of one device. allocated, reserved: bytes now; `peak_reserved`: at most so far.

    Streams are numbers. addresses(size, stream) says where a new segment lies; None: each behind
    the one before.
    """

    def __init__(
        self, *, expandable: bool = False, addresses: Callable[[int, int], int] | None = None
    ) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._expandable = expandable
        self._addresses = addresses or self._behind_the_last
        self._top = 0
        self._free: dict[tuple[int, bool], list[tuple[int, int, DeviceBlock]]] = {}
        self._ends: dict[tuple[int, bool], DeviceBlock] = {}

    def allocate(self, size: int, stream: int = 0) -> DeviceBlock:
        """Return a block for so many bytes, at least 1."""
        needed = -(-size // ROUNDING) * ROUNDING
        pool = stream, needed <= SMALL
        block = self._best(pool, needed) or self._new(pool, needed)
        self._taken(block)
        left = block.size - needed
        if left >= ROUNDING if pool[1] or self._expandable else left > SMALL:
            self._split(block, needed)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: DeviceBlock) -> None:
        """Take a block back."""
        self.allocated -= block.size
        self._merge(block)
        self._put(block)

    def add_segment(self, address: int, size: int, stream: int, *, small: bool) -> DeviceBlock:
        """Take a segment from the driver, and return it as one free block."""
        block = DeviceBlock(address, size, (stream, small))
        self._more(size)
        self._put(block)
        return block

    def _best(self, pool: tuple[int, bool], needed: int) -> DeviceBlock | None:
        free = self._free.get(pool, [])
        place = bisect_left(free, (needed,))
        if place == len(free):
            return None
        block = free[place][2]
        if self._expandable and block is self._ends[pool] and place + 1 < len(free):
            return free[place + 1][2]
        return block

    def _new(self, pool: tuple[int, bool], needed: int) -> DeviceBlock:
        stream, small = pool
        if self._expandable:
            return self._grown(pool, needed)
        size = -(-needed // SMALL_SEGMENT) * SMALL_SEGMENT
        if small:
            size = SMALL_SEGMENT
        elif needed < OWN_SEGMENT:
            size = LARGE_SEGMENT
        return self.add_segment(self._addresses(size, stream), size, stream, small=small)

    def _grown(self, pool: tuple[int, bool], needed: int) -> DeviceBlock:
        page = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
        last = self._ends.get(pool)
        there = last.size if last is not None and last.free else 0
        size = -(-(needed - there) // page) * page
        address = self._addresses(SPACE, pool[0]) if last is None else last.address + last.size
        self._more(size)
        block = DeviceBlock(address, size, pool)
        if last is not None:
            block.before, last.behind = last, block
        self._ends[pool] = block
        self._merge(block)
        self._put(block)
        return block

    def _split(self, block: DeviceBlock, needed: int) -> None:
        rest = DeviceBlock(block.address + needed, block.size - needed, block.pool)
        rest.before, rest.behind = block, block.behind
        if block.behind is not None:
            block.behind.before = rest
        if self._ends.get(block.pool) is block:
            self._ends[block.pool] = rest
        block.behind, block.size = rest, needed
        self._put(rest)

    def _merge(self, block: DeviceBlock) -> None:
        """Let a block that is in no list absorb its free neighbours."""
        before, behind = block.before, block.behind
        if before is not None and before.free:
            self._taken(before)
            block.address, block.size = before.address, before.size + block.size
            block.before = before.before
            if block.before is not None:
                block.before.behind = block
        if behind is not None and behind.free:
            self._taken(behind)
            block.size += behind.size
            block.behind = behind.behind
            if block.behind is not None:
                block.behind.before = block
            if self._ends.get(block.pool) is behind:
                self._ends[block.pool] = block

    def _put(self, block: DeviceBlock) -> None:
        block.free = True
        insort(self._free.setdefault(block.pool, []), (block.size, block.address, block))

    def _taken(self, block: DeviceBlock) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]
        block.free = False

    def _more(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _behind_the_last(self, size: int, _: int) -> int:
        address, self._top = self._top, self._top + size
        return address
