"""Shortages of this machine: recognized by the errors that they cause, and what to do.

Processes that zerocheck started show theirs only in the text of an error, or as a number that a
control group counts.
"""

from __future__ import annotations

import errno
import math
import os
import re
import resource
import subprocess
import sys

from zerocheck.machine.host import available_bytes

ROOM = "make room there, or give another --report-dir or another TMPDIR"
MEMORY = "there is not enough memory; allow more (ulimit -v, ulimit -d, or the control group)"
FILES = "too many files are open; allow more (ulimit -n)"
PROCESSES = (
    "no further process or thread may be started; allow more (ulimit -u, or the pids limit of the "
    "control group)"
)
THREADS = (
    "a rank could not start a thread; allow more processes (ulimit -u, or the pids limit of the "
    "control group) or more memory (ulimit -v, ulimit -d)"
)
SCRATCH_PREFIX = "zerocheck-ranks-"
"""Begin of the names of the temporary directories of ranks."""
AGAIN = "run again: --reuse with the report's directory takes over what was judged"
KILLED = (
    "a process of zerocheck was killed from outside, as the kernel does where memory runs out; "
    f"{AGAIN}"
)
STOPPED = f"a process of zerocheck does nothing, as if it was stopped (SIGSTOP); {AGAIN}"
DISK = f"no room is left on the file system; {ROOM}"
_BY_NUMBER = {
    errno.ENOSPC: DISK,
    errno.EDQUOT: f"the quota of the file system is used up; {ROOM}",
    errno.EFBIG: "a file would become larger than is allowed; allow more (ulimit -f)",
    errno.EROFS: "the file system is read-only; give another --report-dir or another TMPDIR",
    errno.EACCES: "it may not be written or read; give another --report-dir or another TMPDIR",
    errno.EMFILE: FILES,
    errno.ENFILE: FILES,
    errno.ENOMEM: MEMORY,
    errno.EAGAIN: PROCESSES,
}
_BY_TEXT = {
    r"can't start new thread|Resource temporarily unavailable|pthread_create": PROCESSES,
    # libstdc++, where the constructor of gloo's threads fails.
    r"terminate called without an active exception": THREADS,
    r"Too many open files": FILES,
    r"[Cc]annot allocate memory|MemoryError|failed to map segment|bad_alloc|can't allocate"
    r"|could not create a primitive": MEMORY,  # oneDNN's, where the room for one is lacking
    r"No space left on device": DISK,
    r"File too large": _BY_NUMBER[errno.EFBIG],
    r"process that starts ranks is gone: .*exit code -\d": KILLED,
    r"process that starts ranks is gone: no answer for": STOPPED,
    r"No usable temporary directory": "no temporary file can be written; set TMPDIR to a directory "
    "with room that can be written, and let files grow (ulimit -f)",
}
_THREADS_OF_A_RANK, _FILES_OF_A_RANK, _BYTES_OF_A_RANK = 32, 256, 128 << 20
_AMPLE_BYTES = 4 << 30
"""More than a rank needs: code under test that has used up so much would use up any amount."""


def shortage(error: BaseException) -> str | None:
    """Name what the machine lacks and what to do; None for an error of another kind."""
    if isinstance(error, MemoryError):
        return MEMORY
    if isinstance(error, SystemError) and _memory_is_limited():
        return MEMORY  # C code that returned NULL for want of memory, and set no exception
    if isinstance(error, OSError) and error.errno in _BY_NUMBER:
        where = f"{error.filename}: " if error.filename else ""
        return where + _BY_NUMBER[error.errno]
    if isinstance(error, FileNotFoundError) and _is_ours(error.filename):
        return f"{error.filename} was removed while zerocheck used it; {AGAIN}"
    return shortage_in(str(error))


def _is_ours(name: object) -> bool:
    """Return True for the path of a temporary file or directory that zerocheck made."""
    return f"{os.sep}{SCRATCH_PREFIX}" in str(name)


def shortage_in(text: str) -> str | None:
    """Name the shortage that a message or the output of a process shows, as `shortage` does."""
    return next((words for part, words in _BY_TEXT.items() if re.search(part, text)), None)


def is_ample(words: str, ranks: int) -> bool:
    """Return True if the machine leaves so many ranks, next to no others, ample room.

    words: a shortage. If the room is ample, the code under test used it up.
    """
    if words in (PROCESSES, THREADS):
        needed = _THREADS_OF_A_RANK * ranks
        # Stacks of threads take memory that a process of its own does not show.
        return startable(needed) >= needed and not _memory_is_limited(_AMPLE_BYTES)
    if words == FILES:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return limit == resource.RLIM_INFINITY or limit >= _FILES_OF_A_RANK
    if words == MEMORY:
        available = available_bytes()
        return available is None or available >= _BYTES_OF_A_RANK * ranks
    return words != DISK


_START_THREADS = """
import _thread, sys, time
_thread.stack_size(1 << 16)
started = 0
try:
    while started < int(sys.argv[1]):
        _thread.start_new_thread(time.sleep, (60,))
        started += 1
except RuntimeError:
    pass
print(started, flush=True)
import os
os._exit(0)
"""


def startable(count: int) -> int:
    """Return how many processes and threads can be started now, `count` at most.

    They are started, for a moment: a process with threads. The kernel alone knows whether a limit
    applies, which depends on the user, capabilities, namespaces and control groups.
    """
    command = [sys.executable, "-I", "-S", "-c", _START_THREADS, str(count - 1)]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # else threads reserve 64 MiB each
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, cwd="/"
        )
    except BlockingIOError:
        return 0
    # One that fails for another reason shows nothing of processes.
    return 1 + int(done.stdout) if done.stdout.strip().isdigit() else count


def _memory_is_limited(below: float = math.inf) -> bool:
    """Return True if a process may take no more memory than some limit below this."""
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    given = (resource.getrlimit(one)[0] for one in limits)
    return any(one != resource.RLIM_INFINITY and one < below for one in given)
