"""Private directories of a pool, their files, and the removal of those of dead pools."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time

from zerocheck.machine.shortage import SCRATCH_PREFIX


def log_path(directory: str, rank: int) -> str:
    """Where the rank's stdout and stderr go."""
    return os.path.join(directory, f"output-{rank}")


def stack_path(directory: str, rank: int) -> str:
    """Where the rank writes its Python stacks on SIGUSR1."""
    return os.path.join(directory, f"stack-{rank}")


def rendezvous_path(directory: str) -> str:
    """Where the ranks of a team find each other."""
    return os.path.join(directory, "rendezvous")


_OWNER = ".owner"
_STALE_S = 60.0
SHARED_MEMORY = "/dev/shm"


class Scratch:
    """Two directories, mode 0700: `slow` in the temp directory, `fast` in shared memory.

    Where there is no usable shared memory both are the same.
    """

    def __init__(self, *, shared_memory: str = SHARED_MEMORY) -> None:
        self.shared_memory = shared_memory
        base = tempfile.gettempdir()
        _sweep(base)
        self.slow = tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-", dir=base)
        self._locks = [_own(self.slow)]
        self.fast = self.slow
        if os.path.isdir(shared_memory) and os.access(shared_memory, os.W_OK | os.X_OK):
            with contextlib.suppress(OSError):
                _sweep(shared_memory)
                self.fast = tempfile.mkdtemp(
                    prefix=f"{SCRATCH_PREFIX}{os.getpid()}-", dir=shared_memory
                )
                self._locks.append(_own(self.fast))

    @property
    def directories(self) -> list[str]:
        """Fastest first."""
        return [self.slow] if self.fast == self.slow else [self.fast, self.slow]

    def check(self) -> None:
        """Raise FileNotFoundError if the directory of temporary files itself is gone.

        What ranks did without it says nothing. What user code removes comes back: see `make`.
        """
        if not os.path.isdir(os.path.dirname(self.slow)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.slow)

    def make(self, base: str, name: str) -> str:
        """A new directory in one of `directories`, which comes back if user code removed it."""
        path = os.path.join(base, name)
        try:
            os.mkdir(path, 0o700)
        except FileNotFoundError:
            os.mkdir(base, 0o700)
            self._locks.append(_own(base))
            os.mkdir(path, 0o700)
        return path

    def remove(self) -> None:
        for directory in self.directories:
            shutil.rmtree(directory, ignore_errors=True)
        for lock in self._locks:
            os.close(lock)
        self._locks = []


def _own(directory: str) -> int:
    """Lock the directory for as long as this process lives."""
    lock = os.open(os.path.join(directory, _OWNER), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def _sweep(base: str) -> None:
    """Remove directories of ours whose owner is gone.

    Usually the zygote does it; this is for the day when parent and zygote were killed together.
    """
    for entry in os.scandir(base):
        if not entry.name.startswith(SCRATCH_PREFIX):
            continue
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            # A young directory may not be locked yet.
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _STALE_S:
                continue
            lock = os.open(os.path.join(entry.path, _OWNER), os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry.path, ignore_errors=True)
            finally:
                os.close(lock)
