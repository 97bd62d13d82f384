"""Memory of the host that a rank takes whose shards are offloaded, and what is copied.

Pinned memory comes from torch's caching host allocator: each tensor gets a block of the next power
of two, and a block that is free again is kept for a tensor of the same power. Source:
aten/src/ATen/core/CachingHostAllocator.h, `allocate`; PYTORCH_ALLOC_CONF has
`pinned_max_round_threshold_mb`, above which nothing is rounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from .extrapolate import NotUniform, grown
from .log import Log
from .result import HostMemory
from .simulate import MIDDLE, STEPS, Simulation
from .timeline import of_shards, timeline


@dataclass(frozen=True, slots=True)
class SimulatedHost:
    """Memory of the host that a rank takes. shards: bytes of it that stay between steps."""

    memory: HostMemory
    shards: int


def simulated_host(one: Simulation, left_out: int = 0) -> SimulatedHost:
    """Return what a simulated rank takes of the host. left_out: see `analyse.run`."""
    line = timeline(one.log, one.blocks, host=True)
    taken, pinned, rounded = _taken(one.log)
    last = [copy for copy in one.log.copies if copy.step == STEPS - 1]
    last += left_out * [copy for copy in last if copy.microbatch == MIDDLE]
    memory = HostMemory(
        peak=line.peak(),
        taken=taken,
        pinned=pinned,
        rounded=rounded,
        to_device=sum(copy.size for copy in last if not copy.to_host),
        to_host=sum(copy.size for copy in last if copy.to_host),
    )
    return SimulatedHost(memory, of_shards(line.at_end("step", STEPS - 1)))


def _taken(log: Log) -> tuple[int, int, int]:
    """Return `taken`, `pinned` and `rounded` of HostMemory."""
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


SIZES = ("taken", "pinned", "rounded", "to_device", "to_host")


def host_of_more_blocks(given: Sequence[SimulatedHost], blocks: int) -> SimulatedHost:
    """Extrapolate from three models, each with one block more, to `blocks` more than the first has.

    Raises NotUniform if the bytes do not grow by a constant, or the peak is elsewhere.
    """
    memories = [one.memory for one in given]
    peaks = [one.peak for one in memories]
    if len({(one.step, one.phase, one.operator, one.asked, *one.bytes) for one in peaks}) > 1:
        raise NotUniform("the peak of the host is elsewhere with more blocks")

    def more(sizes: Sequence[int]) -> int:
        return grown(sizes, blocks, "bytes of the host do")

    held = {name: more([one.bytes[name] for one in peaks]) for name in peaks[0].bytes}
    sizes = {name: more([getattr(one, name) for one in memories]) for name in SIZES}
    peak = structs.replace(peaks[0], bytes=held)
    memory = structs.replace(memories[0], peak=peak, **sizes)
    return SimulatedHost(memory, more([one.shards for one in given]))
