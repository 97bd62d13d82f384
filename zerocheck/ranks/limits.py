"""Limits on ranks: their number on this machine, and the memory of each."""

from __future__ import annotations

import contextlib
import re
import resource
import sys

from zerocheck.errors import UsageError
from zerocheck.machine.host import available_bytes, process_limits

RANK_BYTES = 60 << 20
"""What a rank has for itself before any job; the rest it shares with the zygote."""
RANK_THREADS = 16
"""Threads of a rank once it has made a few meshes, each with process groups; no bound."""
MOST_RANKS = 250


def check_world_size(world_size: object) -> int:
    """Return the world size as an int. Raises UsageError for one that no machine can have."""
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise UsageError(f"a world size is a whole number, not {world_size!r}")
    if world_size < 1:
        raise UsageError(f"a world size is at least 1, not {world_size}")
    if world_size > MOST_RANKS:
        raise UsageError(
            f"world size {world_size} is more than {MOST_RANKS} processes on one machine"
        )
    return world_size


def has_room(world_size: int) -> bool:
    """Return True if control groups and memory have room for so many new ranks."""
    available = available_bytes()
    enough = available is None or world_size * RANK_BYTES <= available
    return enough and all(one.left >= world_size * RANK_THREADS for one in process_limits())


def check_room(world_size: int) -> None:
    """Raise UsageError, with the numbers, if there is no memory for so many new ranks."""
    available = available_bytes()
    if available is not None and world_size * RANK_BYTES > available:
        raise UsageError(
            f"world size {world_size} needs about {world_size * RANK_BYTES >> 20} MiB"
            f" ({RANK_BYTES >> 20} MiB a rank), but {available >> 20} MiB are free:"
            f" {available // RANK_BYTES} ranks would fit"
        )


SHARE = 0.8
"""Share of the available memory for all ranks of a job; the parent and the judge need the rest."""
_MEMORY = re.compile(r"can't allocate memory|not enough memory|std::bad_alloc", re.IGNORECASE)
"""Messages of torch's allocator for the CPU; its RuntimeError has no other mark."""


def room(world_size: int, needed: int = 0) -> int:
    """Bytes that one rank of a new job may take for itself; 0 for no bound.

    needed: of the whole job, as estimated in advance (run/execute/host_memory.py). One rank may
    need all of it, as one that gathers the model does, and its share of the rest for activations.
    """
    available = available_bytes()
    if available is None or sys.platform != "linux":
        return 0
    return int(SHARE * available) // world_size + needed


class MemoryBound:
    """While it is entered, this process gets at most `room` bytes more than it has; 0: no bound.

    Without one, endless recursion or an endless list takes all there is, until the kernel kills
    some process: the rank, its parent, or another user's.

    RLIMIT_DATA counts private writable memory, and not what ranks share with the parent (arenas)
    nor address space that is only reserved, as RLIMIT_AS does (setrlimit(2)).
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._before = _private_bytes()
        self._resident = _forget_peak() if room else 0
        self._soft, self._hard = resource.getrlimit(resource.RLIMIT_DATA)
        self.words = ""
        """Shortage behind the exception that left it: `"out of memory: ..."`, or ""."""

    def __enter__(self) -> MemoryBound:
        if self._room:
            most = self._before + self._room
            if self._soft != resource.RLIM_INFINITY:
                most = min(most, self._soft)
            self._set(most)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._room:
            return
        # What it held is free by now, where the exception left the frames that had it.
        taken = max(0, _peak_bytes() - self._resident, _private_bytes() - self._before)
        self._set(self._soft)  # to say what happened takes memory
        if error is not None and is_out_of_memory(error):
            self.words = (
                f"out of memory: the rank held up to {taken / 1e9:.3g} GB of the "
                f"{self._room / 1e9:.3g} GB that it may take"
            )

    def _set(self, most: int) -> None:
        with contextlib.suppress(OSError, ValueError):  # a sandbox that allows none of it
            resource.setrlimit(resource.RLIMIT_DATA, (most, self._hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if memory of the host could not be allocated."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _MEMORY.search(str(error)) is not None
    )


def _private_bytes() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts; 0 where /proc does not tell."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as statm:
        return int(statm.read().split()[5]) * resource.getpagesize()
    return 0


def _forget_peak() -> int:
    """Let the peak of resident memory begin anew, and return it; maxsize where it cannot."""
    with contextlib.suppress(OSError):
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")  # proc_pid_clear_refs(5)
        return _peak_bytes()
    return sys.maxsize


def _peak_bytes() -> int:
    """Return the most resident bytes that this process had; 0 where /proc does not tell."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0
