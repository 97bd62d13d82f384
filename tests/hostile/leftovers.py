"""What a run left behind: processes, files of temporary directories, shared memory."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

VARIABLE = "ZEROCHECK_TESTS_MARK"
SHARED_MEMORY = Path("/dev/shm")


class Leftovers:
    """A mark in the environment of what is started, by which its processes are found again.

    Who forks, leaves its process group or its session, or executes another program keeps it.
    """

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.environment = {VARIABLE: self.mark}
        self._shared = _names(SHARED_MEMORY)

    def processes(self) -> dict[int, str]:
        """The living ones by pid, each with its command line."""
        wanted = f"{VARIABLE}={self.mark}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if not entry.name.isdecimal() or entry.name == str(os.getpid()):
                    continue
                if wanted not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry.name)] = command.decode(errors="replace").strip()
        return found

    def gone(self, timeout_s: float, *, but: frozenset[int] = frozenset()) -> None:
        """Assert that every process ends within that time, those in `but` aside. Those that do not
        are ended: the next test is to find its own."""
        ends = time.monotonic() + timeout_s
        while (left := set(self.processes()) - but) and time.monotonic() < ends:
            time.sleep(0.05)
        living = self.processes()
        _kill(left)
        assert not left, {pid: living.get(pid, "ended late") for pid in left}

    def shared_memory(self, *owners: int) -> set[str]:
        """New names in shared memory that bear the pid of one of the owners."""
        new = _names(SHARED_MEMORY) - self._shared
        return {name for name in new if any(f"-{owner}-" in name for owner in owners)}

    def kill(self) -> None:
        """End what a failed test left."""
        _kill(self.processes())


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _names(directory: Path) -> set[str]:
    return set(os.listdir(directory)) if directory.is_dir() else set()
