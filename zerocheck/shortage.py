"""Shortages of the machine, recognized by the errors that they cause: room, descriptors, processes,
memory."""

from __future__ import annotations

import errno
import re
import resource

_ROOM = "make room there, or give another --report-dir or another TMPDIR"
_MEMORY = "there is not enough memory; allow more (ulimit -v, ulimit -d, or the control group)"
_FILES = "too many files are open; allow more (ulimit -n)"
_PROCESSES = (
    "no further process or thread may be started; allow more (ulimit -u, or the pids limit of the "
    "control group)"
)
_THREADS = (
    "a rank could not start a thread; allow more processes (ulimit -u, or the pids limit of the "
    "control group) or more memory (ulimit -v, ulimit -d)"
)
_BY_NUMBER = {
    errno.ENOSPC: f"no room is left on the file system; {_ROOM}",
    errno.EDQUOT: f"the quota of the file system is used up; {_ROOM}",
    errno.EFBIG: "a file would become larger than is allowed; allow more (ulimit -f)",
    errno.EROFS: "the file system is read-only; give another --report-dir or another TMPDIR",
    errno.EACCES: "it may not be written or read; give another --report-dir or another TMPDIR",
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENOMEM: _MEMORY,
    errno.EAGAIN: _PROCESSES,
}
_BY_TEXT = {
    r"can't start new thread|Resource temporarily unavailable|pthread_create": _PROCESSES,
    # libstdc++, where the constructor of gloo's threads fails.
    r"terminate called without an active exception": _THREADS,
    r"Too many open files": _FILES,
    r"Cannot allocate memory|MemoryError|failed to map segment|bad_alloc|can't allocate": _MEMORY,
    r"No space left on device": _BY_NUMBER[errno.ENOSPC],
    r"File too large": _BY_NUMBER[errno.EFBIG],
    r"No usable temporary directory": "no temporary file can be written; set TMPDIR to a directory "
    "with room that can be written, and let files grow (ulimit -f)",
}


def shortage(error: BaseException) -> str | None:
    """Name what the machine lacks and what to do; None for an error of another kind.

    Processes that zerocheck started show theirs only in the text of the error.
    """
    if isinstance(error, MemoryError):
        return _MEMORY
    if isinstance(error, SystemError) and _memory_is_limited():
        return _MEMORY  # C code that returned NULL for want of memory, and set no exception
    if isinstance(error, OSError) and error.errno in _BY_NUMBER:
        where = f"{error.filename}: " if error.filename else ""
        return where + _BY_NUMBER[error.errno]
    for pattern, words in _BY_TEXT.items():
        if re.search(pattern, str(error)):
            return words
    return None


def _memory_is_limited() -> bool:
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(resource.getrlimit(one)[0] != resource.RLIM_INFINITY for one in limits)
