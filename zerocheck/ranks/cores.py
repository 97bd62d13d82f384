"""A machine-wide semaphore: several runs (pytest-xdist) share the processors.

N lock files, one per processor: ranks mostly wait for each other, so a run of any world size keeps
one to two processors busy, and as many runs as processors waste none. The kernel releases the lock
of a dead holder, and one that a signal stopped is passed by. It is a courtesy and not a guarantee:
who has waited too long goes ahead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time

from zerocheck.machine import signals
from zerocheck.machine.host import processors
from zerocheck.ranks.watchdog import activity

_POLL_S = 0.01
_LOOK_S = 0.5
"""Time between two looks whether a holder is stopped."""
PATIENCE_S = 30.0
"""After that long without a slot, a run goes on without one."""
QUANTUM_S = 2.0
"""A holder that has had its slot for longer lets others pass, if there are any."""


class Cores:
    """One process's claim to one slot. Holding twice is holding once, so it cannot deadlock."""

    def __init__(
        self,
        *,
        slots: int | None = None,
        directory: str | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._slots = processors() if slots is None else slots
        self._directory = _private_directory() if directory is None else directory
        self._patience_s = patience_s
        self._lock = -1
        self._waiting = -1
        self._since = 0.0
        self._wanted_since: float | None = None
        self._looked = -_LOOK_S
        self._held = False

    @property
    def held(self) -> bool:
        return self._held

    def try_hold(self) -> bool:
        """Take a slot if one is free, or if this process has waited its patience out."""
        if self._held:
            return True
        now = time.monotonic()
        if self._directory is None:
            self._held = True
        else:
            looks = now - self._looked >= _LOOK_S  # to read of a process takes longer than to lock
            self._looked = now if looks else self._looked
            for slot in range(self._slots):
                lock = self._try_lock(f"slot-{slot}", fcntl.LOCK_EX)
                if lock < 0 and looks and self._holder_stopped(slot):
                    lock = self._try_lock(f"slot-{slot}-of-a-stopped-process", fcntl.LOCK_EX)
                if lock >= 0:
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, str(os.getpid()).encode(), 0)
                    self._lock = lock
                    self._held = True
                    break
        if self._wanted_since is None:
            self._wanted_since = now
        if not self._held and now - self._wanted_since > self._patience_s:
            self._held = True
        if self._held:
            self._since = now
            self._stop_waiting()
        elif self._waiting < 0 and self._directory is not None:
            # Shared, so that any number can wait; a holder sees that somebody does.
            self._waiting = self._try_lock("waiting", fcntl.LOCK_SH)
        return self._held

    def hold(self) -> None:
        """Take a slot; block while all are taken, but not for ever."""
        while not self.try_hold():
            signals.check()
            time.sleep(_POLL_S)

    def should_pass_on(self) -> bool:
        """Return True if the slot was held for its quantum and another process waits for one."""
        if self._lock < 0 or time.monotonic() - self._since < QUANTUM_S:
            return False
        lock = self._try_lock("waiting", fcntl.LOCK_EX)
        if lock >= 0:
            os.close(lock)
            self._since = time.monotonic()  # nobody waits: ask again after another quantum
            return False
        return True

    def release(self, *, give_way: bool = False) -> None:
        """Free the slot. With `give_way`, sleep for as long as a waiter needs to see it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        self._held = False
        self._stop_waiting()
        if give_way:
            time.sleep(2 * _POLL_S)

    def _holder_stopped(self, slot: int) -> bool:
        """Return True if a signal stopped the holder, as a shell does in the background."""
        assert self._directory is not None
        try:
            with open(os.path.join(self._directory, f"slot-{slot}"), "rb") as file:
                state = activity(int(file.read()), alone=True)
        except (OSError, ValueError):
            return False
        return state is not None and state.stopped

    def _stop_waiting(self) -> None:
        self._wanted_since = None
        if self._waiting >= 0:
            os.close(self._waiting)
            self._waiting = -1

    def _try_lock(self, name: str, kind: int) -> int:
        """The descriptor that holds the lock, or -1."""
        assert self._directory is not None
        descriptor = -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(os.path.join(self._directory, name), flags, 0o600)
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError:
            if descriptor >= 0:
                os.close(descriptor)
            return -1
        return descriptor


def _private_directory() -> str | None:
    """A directory that only this user can write, or None where that cannot be had."""
    path = os.path.join(tempfile.gettempdir(), f"zerocheck-cores-{os.getuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.lstat(path)
    except OSError:
        return None
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return path if private and not status.st_mode & 0o077 else None
