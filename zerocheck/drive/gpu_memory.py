"""Memory attribution of a rank on a GPU: the caching allocator's records, and their gaps.

On the CPU the allocator's events are those of one thread, by torch's profiler. On a GPU the
backward runs on another thread, and memory is given back by whoever holds it last; but the caching
allocator keeps a history of its own, of all threads, in the order in which they asked. It says the
bytes that were asked for, so that what a tensor holds is counted as on the CPU. Beside that stands
what the allocator adds: it hands out multiples of 512 bytes (`rounding`), and reserves whole
segments, of which something lies unused between blocks (`inactive`).

The account is closed against `torch.cuda.memory_allocated` at the end of each phase: what the
history has alive, with its rounding, must be that, to the byte.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..compat_memory import Allocation, AllocatorHistory, LastOfNccl, Snapshot, map_bytes
from ..protocol.measurements import CudaPool
from .attribution import MARK, UNTOLD, PhaseEnd
from .collective_release import PATIENCE_S
from .holders import Claim, Claims, address


class DeviceLog:
    """Counterpart of `AllocatorLog` for tensors on a GPU.

    marks within a phase are not needed: memory used by a collective within it matters for peaks
    alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._history = AllocatorHistory(device)
        self._events: list[str | Allocation] = []
        self._alive: dict[int, int] = {}
        self._earlier: dict[int, int] = {}
        """{address: bytes} of what was handed out before the start and is not yet taken back."""
        self._others = 0
        self._hosts: dict[int, int] = {}
        self.pools: list[CudaPool] = []

    def start(self) -> None:
        """Start recording. Memory allocated before is not counted."""
        self._last_of_nccl = LastOfNccl(self._device)
        self._history.start()
        now = self._history.taken()
        self._earlier = _handed_out(now)
        self._others = now.allocated - sum(self._earlier.values())

    def mark(self, name: str) -> None:
        """Do nothing: see `over`."""

    def over(self, place: PhaseEnd, claims: Claims) -> None:
        """End a phase at `place`; claims: held by Python, to which memory on the CPU is added.

        The optimizer's step counts are there, and of each of DDP's two maps of used parameters one.
        """
        if place.phase == "closed":
            self._last_of_nccl.let_go()
        now = self._taken(claims if place.phase == "closed" else None)
        hosts = _on_host(claims)
        for number, held in enumerate(_maps()):
            hosts[-1 - number] = held
            claims[-1 - number] = Claim(1, "bucket", "a map of DDP on the CPU")
        self._events += changes(self._hosts, hosts)
        self._hosts = hosts
        self._events.append(place.mark)
        self.pools.append(pool_of(place, now, self._before(), self._alive))

    def _before(self) -> int:
        """Bytes that were allocated at the start and still are.

        NCCL's watchdog thread may free what an earlier case gave to a collective only now.
        """
        return self._others + sum(self._earlier.values())

    def _taken(self, claims: Claims | None) -> Snapshot:
        """Take a snapshot of the allocator, and record its history.

        claims: wait until nothing else is alive, since what DDP's reducer gave to NCCL is freed by
        NCCL's watchdog thread, which looks every 0.1 s; None: do not wait.
        """
        ends = time.monotonic() + PATIENCE_S
        while True:
            now = self._history.taken()
            for event in events_of(now.trace):
                self._events.append(event)
                if event.bytes > 0:
                    self._alive[event.address] = event.bytes
                elif self._alive.pop(event.address, None) is None:
                    self._earlier.pop(event.address, None)
            settled = claims is None or all(where in claims for where in self._alive)
            if settled or time.monotonic() > ends:
                return now
            time.sleep(0.01)

    def stop(self, marks: str) -> list[str | Allocation]:
        """Return all events in their order; marks: as of AllocatorLog."""
        assert marks == MARK
        self._history.stop()
        return self._events


def events_of(trace: Sequence[Mapping[str, Any]]) -> Iterator[Allocation]:
    """Iterate over allocations and releases in the allocator's history, in order.

    Bytes are those that were asked for. Memory counts as taken back when that is asked for
    ("free_requested"), as `memory_allocated` has it, and not when the last stream is through.
    """
    for entry in trace:
        if entry["action"] == "alloc":
            yield Allocation(entry["addr"], entry["size"], UNTOLD)
        elif entry["action"] == "free_requested":
            yield Allocation(entry["addr"], -entry["size"], UNTOLD)


def changes(before: Mapping[int, int], now: Mapping[int, int]) -> Iterator[Allocation]:
    """Iterate over the events between two states {address: bytes}."""
    for where, held in before.items():
        if now.get(where) != held:
            yield Allocation(where, -held, UNTOLD)
    for where, held in now.items():
        if before.get(where) != held:
            yield Allocation(where, held, UNTOLD)


def pool_of(place: PhaseEnd, now: Snapshot, before: int, alive: Mapping[int, int]) -> CudaPool:
    """Return the allocator's report at the end of a phase.

    before: bytes allocated before the run; alive: {address: bytes asked for} of the allocations in
    the history.
    """
    blocks = _handed_out(now)
    asked = sum(alive.values())
    return CudaPool(
        step=place.step,
        phase=place.phase,
        asked=asked,
        rounding=sum(blocks[where] for where in alive if where in blocks)
        - sum(held for where, held in alive.items() if where in blocks),
        allocated=now.allocated - before,
        reserved=now.reserved,
        inactive=now.inactive,
    )


def _handed_out(now: Snapshot) -> dict[int, int]:
    """Map the addresses of blocks in use to their bytes."""
    return {
        block["address"]: block["size"]
        for segment in now.segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def _on_host(claims: Claims) -> dict[int, int]:
    """Map the addresses of claimed memory on the CPU to its bytes."""
    found = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.device.type == "cpu":
            where = address(one)
            if where and where in claims:
                found[where] = int(one.untyped_storage().nbytes())
    return found


def _maps() -> list[int]:
    """Return the bytes of the CPU map of each living reducer of DDP."""
    return [
        map_bytes(one)
        for one in gc.get_objects()
        if issubclass(type(one), DistributedDataParallel) and "reducer" in vars(one)
    ]
