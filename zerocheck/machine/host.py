"""Memory of this host, files that replace it, and the limits of control groups.

A group is found as the kernel shows it: /proc/self/cgroup names it in each hierarchy, and
/proc/self/mountinfo where that hierarchy is mounted (cgroups(7), proc_pid_mountinfo(5)).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What says that a file system has no room."""
_MEMINFO = "/proc/meminfo"


def total_bytes() -> int | None:
    """Return the smaller of the machine's memory and the control group's limit, None if unknown."""
    found = _meminfo("MemTotal:") + [group.limit for group in memory_limits()]
    return min(found) if found else None


def open_above(path: str, flags: int) -> int:
    """Open a file of mode 0600 under a descriptor above those of the standard streams.

    Code that closed these may still print: what is opened under their numbers would get it.
    """
    descriptor = os.open(path, flags, 0o600)
    if descriptor > 2:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, descriptor)
        if null > 2:
            os.close(null)


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


def processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def leaves(part: int, more: int) -> bool:
    """Return True if `more` bytes leave a `part`th of the memory, or its size is unknown."""
    available, total = available_bytes(), total_bytes()
    return available is None or total is None or available - more >= total // part


def prefer_huge_pages(environment: MutableMapping[str, str]) -> None:
    """Ask torch for huge pages in processes with this environment, unless it says otherwise.

    A page fault every 4 KiB is most of what a large vector costs. torch reads the variable at its
    first allocation (c10/core/impl/alloc_cpu.cpp); it concerns 2 MiB and more.
    """
    environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")


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


PROC = Path("/proc/self")
UNLIMITED = 1 << 60
"""Version 1 writes a number near 2**63 where there is no limit."""


class GroupLimit(NamedTuple):
    """Limit of a control group, and the part of it that is in use: bytes or processes."""

    limit: int
    used: int

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


class _Files(NamedTuple):
    """File names of one controller in one version, and the fields of cached files in its stat."""

    limit: str
    used: str
    stat: str = ""
    cached: tuple[str, ...] = ()


_FILES = {
    ("memory", 1): _Files(
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "memory.stat",
        ("total_active_file", "total_inactive_file"),
    ),
    ("memory", 2): _Files(
        "memory.max", "memory.current", "memory.stat", ("active_file", "inactive_file")
    ),
    ("pids", 1): _Files("pids.max", "pids.current"),
    ("pids", 2): _Files("pids.max", "pids.current"),
}


_DENIALS = {
    ("memory", 1): ("memory.oom_control", "oom_kill"),
    ("memory", 2): ("memory.events", "oom_kill"),
    ("pids", 1): ("pids.events", "max"),
    ("pids", 2): ("pids.events", "max"),
}
"""Files that count denials, and the fields in them."""


def memory_limits(proc: Path = PROC) -> list[GroupLimit]:
    """Return the limits in bytes of the process's group and of the groups above it.

    Cached files do not count as used: they make way when memory is short.
    """
    return list(_limits("memory", proc))


def process_limits(proc: Path = PROC) -> list[GroupLimit]:
    """Return the limits of processes and threads of the process's group and of those above it."""
    return list(_limits("pids", proc))


def denials(controller: str, proc: Path = PROC) -> int:
    """Return how often control groups refused a process or thread (`pids`), or killed a process
    for its memory (`memory`); 0 where they do not count it."""
    count = 0
    for version, folder, top in _groups(controller, proc):
        name, key = _DENIALS[controller, version]
        for group in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):
                fields = dict(line.split() for line in (group / name).read_text().splitlines())
                count += int(fields.get(key, 0))
            if group == top:
                break
    return count


def _limits(controller: str, proc: Path) -> Iterator[GroupLimit]:
    for version, folder, top in _groups(controller, proc):
        files = _FILES[controller, version]
        for group in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):
                limit = _number(group / files.limit)
                if limit < UNLIMITED:
                    yield GroupLimit(limit, _number(group / files.used) - _cached(group, files))
            if group == top:
                break


def _groups(controller: str, proc: Path) -> Iterator[tuple[int, Path, Path]]:
    """(version, folder of the process's group, folder of the highest group that is mounted)."""
    names = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "cgroup").read_text().splitlines():
            number, controllers, name = line.split(":", 2)
            if number == "0" and not controllers:
                names[2] = name
            elif controller in controllers.split(","):
                names[1] = name
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "mountinfo").read_text().splitlines():
            mount, _, kind = line.partition(" - ")
            root, point = map(_unescaped, mount.split()[3:5])
            system, _, options = kind.split()[:3]
            version = {"cgroup": 1, "cgroup2": 2}.get(system, 0)
            if version in names and (version == 2 or controller in options.split(",")):
                yield version, _folder(Path(point), root, names[version]), Path(point)


def _folder(point: Path, root: str, name: str) -> Path:
    """Return the folder of a group below a mount point; the mount point if it is not there.

    root: the group that is mounted there. A container sees the name of its group on the host, or
    one above the root of its namespace.
    """
    try:
        below = PurePosixPath(name).relative_to(root)
    except ValueError:
        return point
    return point if ".." in below.parts else point / below


def _number(path: Path) -> int:
    """Raises ValueError for `max`, which is no limit, and OSError for a file that is not there."""
    return int(path.read_text())


def _cached(group: Path, files: _Files) -> int:
    if not files.stat:
        return 0
    fields = (line.split() for line in (group / files.stat).read_text().splitlines())
    return sum(int(value) for name, value in fields if name in files.cached)


def _unescaped(path: str) -> str:
    r"""Return a path of mountinfo with its blanks: `\040` and the like."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)
