"""Counts the file operations of this process, and does something at one of them.

For forked ranks only: an audit hook stays for the life of a process.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

EVENTS = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.listdir",
    "os.scandir",
    "fcntl.flock",
}


class Disturbance:
    """Numbers operations from 0 and calls `act` before the one of number `at`."""

    def __init__(self, at: int | None, act: Callable[[str], None]) -> None:
        self.at = at
        self.act = act
        self.names: list[str] = []

    def passed(self, name: str) -> bool:
        """Note an operation; whether it is the one."""
        self.names.append(name)
        return len(self.names) - 1 == self.at


_now: Disturbance | None = None
_hooked = False


def kill(_: str) -> NoReturn:
    """Die at once, as a process does that the system kills."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed processes do not go on")


def fail(name: str) -> NoReturn:
    """Fail as on a full disk if it writes, else as on a read-only one."""
    raise OSError(28 if name == "write" else 30, f"made to fail at {name}")


def _note(name: str) -> None:
    if _now is not None and _now.passed(name):
        _now.act(name)


class _Raw(io.FileIO):
    """A file whose writes are operations; the one at which something happens is done by half."""

    def write(self, data: Any) -> int:
        if _now is not None and _now.passed("write"):
            super().write(memoryview(data).cast("B")[: len(data) // 2])
            _now.act("write")
        return super().write(data)


def _open(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
    return (
        io.BufferedWriter(_Raw(file, "w"))
        if mode == "wb"
        else _true_open(file, mode, *rest, **named)
    )


def _fsync(handle: int) -> None:
    _note("fsync")
    _true_fsync(handle)


_true_open, _true_fsync = io.open, os.fsync


@contextmanager
def disturbed(at: int | None, act: Callable[[str], None]) -> Iterator[Disturbance]:
    """Act at one operation of what runs inside; at none, only count them."""
    global _now, _hooked
    if not _hooked:
        sys.addaudithook(lambda event, _: _note(event) if event in EVENTS else None)
        _hooked = True
    now = Disturbance(at, act)
    io.open, os.fsync = _open, _fsync  # type: ignore[assignment]
    _now = now
    try:
        yield now
    finally:
        _now = None
        io.open, os.fsync = _true_open, _true_fsync
