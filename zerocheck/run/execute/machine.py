"""Check of this machine before ranks start: what they need is there, or the reason is given.

The figures of memory are lower bounds, measured with zero2 on torch 2.13.0 for the CPU, Python 3.11
and Linux on x86-64. They are kept below what a run took, so that none is refused that would work.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import sys
import tempfile

from ...errors import UsageError
from ...machine import signals
from ...machine.host import available_bytes, free_swap_bytes, process_limits
from ...machine.shortage import startable

DESCRIPTORS, DESCRIPTORS_PER_RANK = 32, 4
"""Files and sockets that a process of a run has open at once, at most. The parent and a rank of 2
had 15 each; user code opens some too."""
MEMORY, MEMORY_PER_RANK = 400 << 20, 40 << 20
"""Bytes of all processes together, without files: 477, 520 and 607 MiB were taken on 1, 2 and 4
ranks. In a control group of 500 MiB 2 ranks failed, in one of 540 MiB they worked."""
ADDRESS_SPACE = 640 << 20
"""Bytes of one process that has imported torch: 680 MiB (ulimit -v) was too little, 850 MiB enough,
and the parent had 695 MiB."""
DATA = 250 << 20
"""Bytes of private memory of one process: 280 MiB (ulimit -d) was too little, 300 MiB enough, and
the parent had 285 MiB."""
THREADS_PER_RANK = 4
"""The rank itself, and the threads that gloo starts in it. gloo ends the rank without one of them.
"""


def check_machine(world_size: int) -> None:
    """Raise UsageError, with what to do, where ranks cannot be started or cannot meet here."""
    _check_names()
    _check_loopback()
    _check_descriptors(DESCRIPTORS + DESCRIPTORS_PER_RANK * world_size)
    check_process_memory()
    _check_memory(world_size)
    _check_processes(world_size)


def check_process_memory() -> None:
    """Raise UsageError where a limit of this process leaves too little memory to import torch."""
    if sys.platform != "linux":
        return
    for number, needed, words, option in (
        (resource.RLIMIT_AS, ADDRESS_SPACE, "address space", "-v"),
        (resource.RLIMIT_DATA, DATA, "memory of its own", "-d"),
    ):
        limit, _ = resource.getrlimit(number)
        if limit != resource.RLIM_INFINITY and limit < needed:
            raise UsageError(
                f"there is not enough memory: a process may take {_mib(limit)} of {words}, and one "
                f"that imports torch needs more than {_mib(needed)}; allow more (ulimit {option})"
            )


def import_torch() -> None:
    """Import torch where there is memory for it. A signal waits: torch ends the process if an
    exception is raised within its import. Raises UsageError as `check_process_memory`."""
    check_process_memory()
    with signals.deferred():
        import torch  # noqa: F401


def _check_memory(world_size: int) -> None:
    available = available_bytes()
    needed = MEMORY + MEMORY_PER_RANK * world_size - _private_bytes()
    if available is not None and available + free_swap_bytes() < needed:
        raise UsageError(
            f"there is not enough memory: {_mib(available)} are available, and a run on "
            f"{_ranks(world_size)} needs more than {_mib(needed)}; take fewer ranks "
            "(--world-sizes), or allow more (the machine, or its control group)"
        )


def _check_processes(world_size: int) -> None:
    needed = 1 + THREADS_PER_RANK * world_size
    started = startable(needed)
    if started < needed:
        groups = any(one.left < needed for one in process_limits())
        what = "the pids limit of the control group" if groups else "ulimit -u"
        raise UsageError(
            f"{started} more processes or threads may be started, and a run on "
            f"{_ranks(world_size)} needs {needed}; allow more ({what})"
        )


def _check_names() -> None:
    for name in (os.getcwd(), tempfile.gettempdir(), *sys.path):
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{name!a} is a directory whose name is not UTF-8, and messages to ranks are; run "
                "this elsewhere"
            ) from error


def _check_loopback() -> None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise UsageError(
            f"ranks meet on 127.0.0.1, which cannot be reached ({error.strerror}); bring the "
            "loopback interface up: ip link set lo up"
        ) from error


def _check_descriptors(needed: int) -> None:
    """Raise this process's limit of descriptors, if it is too low and may be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"{hard} files may be open at once, and ranks need {needed}; allow more (ulimit -n)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _private_bytes() -> int:
    """Return the resident bytes of this process that it shares with no file; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as statm:
        _, resident, shared, *_ = map(int, statm.read().split())
        return (resident - shared) * resource.getpagesize()
    return 0


def _ranks(world_size: int) -> str:
    return f"{world_size} rank{'s' * (world_size > 1)}"


def _mib(count: int) -> str:
    return f"{count >> 20} MiB"
