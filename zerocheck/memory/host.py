"""Memory of the host that a rank takes whose shards are offloaded, and what is copied.

Pinned memory comes from torch's caching host allocator: each tensor gets a block of the next power
of two, and a block that is free again is kept for a tensor of the same power. Source:
aten/src/ATen/core/CachingHostAllocator.h, `allocate`; PYTORCH_ALLOC_CONF has
`pinned_max_round_threshold_mb`, above which nothing is rounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from msgspec import structs

from .log import Log
from .simulate import STEPS, Simulation
from .timeline import HeldBytes, timeline


class HostBytes(NamedTuple):
    """Bytes of the host that one rank takes, and those that it copies in the last step.

    taken: at most, of pageable tensors and of blocks of pinned memory; pinned: of them, blocks;
    rounded: of those, bytes beyond the tensors that they were made for; shards: of the tensors that
    stay between steps.
    """

    taken: int
    pinned: int
    rounded: int
    to_device: int
    to_host: int
    shards: int


@dataclass(frozen=True, slots=True)
class SimulatedHost:
    """Bytes of a rank on the host, and the peak of its tensors there."""

    bytes: HostBytes
    peak: HeldBytes


def simulated_host(one: Simulation) -> SimulatedHost:
    """Return what a simulated rank takes of the host."""
    line = timeline(one.log, one.blocks, host=True)
    held = line.at_end("step", STEPS - 1)
    shards = sum(held.get(category, 0) for category in ("parameter", "gradient", "optimizer"))
    last = [copy for copy in one.log.copies if copy.step == STEPS - 1]
    to_host = sum(copy.size for copy in last if copy.to_host)
    to_device = sum(copy.size for copy in last if not copy.to_host)
    return SimulatedHost(HostBytes(*_taken(one.log), to_device, to_host, shards), line.peak())


def _taken(log: Log) -> tuple[int, int, int]:
    """Return the first fields of HostBytes."""
    pageable = pinned = rounded = taken = 0
    sizes: Counter[int] = Counter()
    held: dict[int, int] = {}  # number of a storage -> bytes of its block
    free: Counter[int] = Counter()
    for moment, number, more in log.changes:
        if log.moments[moment].phase == "closed":
            break
        place = log.storages[number].place
        if place == "device":
            continue
        sizes[number] += more
        if place == "pageable":
            pageable += more
        elif sizes[number]:
            block = held[number] = 1 << (sizes[number] - 1).bit_length()
            if free[block]:
                free[block] -= 1
            else:
                pinned += block
                rounded += block - sizes[number]
        else:
            free[held.pop(number)] += 1
        taken = max(taken, pageable + pinned)
    return taken, pinned, rounded


def host_of_more_blocks(given: Sequence[SimulatedHost], blocks: int) -> SimulatedHost | None:
    """Extrapolate from three models, each with one block more, to `blocks` more than the first has.

    None if the bytes do not grow by a constant, or the peak is elsewhere.
    """
    few = given[0]
    peaks = [one.peak for one in given]
    if len({(one.step, one.phase, one.operator, one.asked) for one in peaks}) > 1:
        return None
    sizes = [[*one.bytes, *one.peak.bytes.values()] for one in given]
    if len({tuple(one.bytes) for one in peaks}) > 1 or len({*map(len, sizes)}) > 1:
        return None
    if any(c - b != b - a for a, b, c in zip(*sizes, strict=True)):
        return None
    grown = [a + blocks * (b - a) for a, b, _ in zip(*sizes, strict=True)]
    split = len(few.bytes)
    held = dict(zip(few.peak.bytes, grown[split:], strict=True))
    return replace(few, bytes=HostBytes(*grown[:split]), peak=structs.replace(few.peak, bytes=held))
