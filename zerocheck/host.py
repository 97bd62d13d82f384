"""Memory of this host, and files that replace it."""

from __future__ import annotations

import contextlib
import errno
import os

from .control_groups import memory_limits

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What says that a file system has no room."""
_MEMINFO = "/proc/meminfo"


def total_bytes() -> int | None:
    """Return the smaller of the machine's memory and the control group's limit, None if unknown."""
    found = _meminfo("MemTotal:") + [group.limit for group in memory_limits()]
    return min(found) if found else None


def available_bytes() -> int | None:
    """Return the smaller of the free memory of machine and control group, None if unknown."""
    found = _meminfo("MemAvailable:") + [group.left for group in memory_limits()]
    return min(found) if found else None


def free_swap_bytes() -> int:
    """Return the free swap space of the machine, 0 where there is none."""
    return sum(_meminfo("SwapFree:"))


def _meminfo(field: str) -> list[int]:
    with contextlib.suppress(OSError, ValueError), open(_MEMINFO) as meminfo:
        for line in meminfo:
            if line.startswith(field):
                return [int(line.split()[1]) << 10]
    return []


def leaves_half(more: int) -> bool:
    """Return True if half of the memory is left after `more` bytes, or its size is unknown."""
    available, total = available_bytes(), total_bytes()
    return available is None or total is None or available - more >= total // 2


def reserve(descriptor: int, size: int) -> None:
    """Allocate `size` bytes of real space for the file, so that a full disk is an error now.

    A sparse file would be a SIGBUS later. Raises OSError (ENOSPC).
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:  # macOS
        have = os.fstat(descriptor).st_size
        os.lseek(descriptor, have, os.SEEK_SET)
        while have < size:
            have += os.write(descriptor, bytes(min(size - have, 1 << 20)))
