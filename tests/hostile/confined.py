"""Limits that need more than a shell: another user's, and those of control groups."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from zerocheck.machine import host

# Root has no limit of processes. Another user may not be allowed to read what Python is made of.
_READS_ALL = "+dac_override,+dac_read_search"
ANOTHER_USER = (
    "setpriv --reuid=54321 --regid=54321 --clear-groups "
    f"--inh-caps={_READS_ALL} --ambient-caps={_READS_ALL}"
)
_FILES = {
    ("memory", 1): "memory.limit_in_bytes",
    ("memory", 2): "memory.max",
    ("pids", 1): "pids.max",
    ("pids", 2): "pids.max",
}


def why_not(command: str) -> str:
    """Reason that a command does not work here; empty where it does."""
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""


@contextmanager
def control_group(controller: str, limit: int) -> Iterator[Path]:
    """A control group below this process's own, with a limit; it is empty at first.

    Raises OSError where none can be made.
    """
    for version, own, _ in vars(host)["_groups"](controller, host.PROC):
        group = Path(own) / f"zerocheck-{uuid4().hex[:8]}"
        group.mkdir()
        try:
            # With version 2 only where the groups below get this controller.
            (group / _FILES[controller, version]).write_text(str(limit))
            yield group
        finally:
            _remove(group)
        return
    raise FileNotFoundError(f"no control group of {controller} is mounted")


def _remove(group: Path) -> None:
    """Remove a group as soon as what was in it has ended."""
    for _ in range(100):
        with suppress(OSError):
            os.rmdir(group)
            return
        time.sleep(0.05)
