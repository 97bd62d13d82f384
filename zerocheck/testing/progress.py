"""Progress of the runs behind tests: a line in pytest's terminal at intervals.

All checks of an implementation wait for one run, so that no dot appears while it goes on. Without
pytest-xdist the run is in this process, and sends its records; with `pytest -n` it is in a worker,
whose journal the controller reads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ..foreign_text import one_line

if TYPE_CHECKING:
    from ..run.records.records import Record
    from ..run.records.tally import Tally

Write = Callable[[str], None]
"""Prints a line."""

INTERVAL_S = 10.0
"""Seconds between two lines of a run."""

JOURNAL = "journal.ndjson"


class RunLines:
    """Handler of a run's records that prints how far it is, at intervals."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._tally: Tally | None = None
        self._began = self._last = 0.0

    def handle(self, record: Record) -> None:
        """Count one record; print a line if the last one is long ago."""
        from ..run.records.records import CaseFinished, RunStarted
        from ..run.records.tally import Tally

        now = time.monotonic()
        if isinstance(record, RunStarted):
            self._tally, self._began, self._last = Tally(), now, now
        if self._tally is None:
            return
        self._tally.add(record)
        if isinstance(record, CaseFinished) and now - self._last >= INTERVAL_S:
            self._last = now
            self._write(line_of(self._tally, now - self._began))


class JournalWatch:
    """Thread that reads the journals of workers, and prints how far they are, at intervals.

    directory: where runs of this session write, each in a folder of its own; since: seconds since
    the epoch, when the session began: journals of earlier ones are not of it.
    """

    def __init__(self, directory: Path, since: float, write: Write) -> None:
        self._directory = directory
        self._since = since
        self._write = write
        self._shown: dict[Path, int] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zerocheck-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. A second call does nothing."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            for path in sorted(self._directory.glob(f"*/{JOURNAL}")):
                try:
                    self._look(path)
                except Exception:  # a journal that is half written: the next look reads it
                    continue

    def _look(self, path: Path) -> None:
        if path.stat().st_mtime < self._since:
            return
        from ..run.records.journal import read
        from ..run.records.tally import tally

        counted = tally(read(path))
        if counted.started is None or counted.complete or counted.started.started < self._since:
            return
        if counted.cases > self._shown.get(path, 0):
            self._shown[path] = counted.cases
            self._write(line_of(counted, time.time() - counted.started.started))


def line_of(counted: Tally, seconds: float) -> str:
    """Format the state of a run: `"zerocheck: MyFSDP: 12 of 48 cases, 2.0 per second, ..."`."""
    from ..report.progress import status_line

    names = ", ".join(map(one_line, counted.implementations))
    return f"zerocheck: {names}: {status_line(counted, seconds)}"


def writer(config: pytest.Config) -> Write | None:
    """Return a function that prints a line in this session's terminal; None where none shows."""
    reporter: Any = config.pluginmanager.getplugin("terminalreporter")
    if hasattr(config, "workerinput") or reporter is None or config.option.verbose < 0:
        return None
    capture: Any = config.pluginmanager.getplugin("capturemanager")

    def write(line: str) -> None:
        # Where tests run in this process, the line would be of their output.
        shown = not controls_workers(config) and capture is not None
        with capture.global_and_fixture_disabled() if shown else nullcontext():
            reporter.ensure_newline()
            reporter.write_line(line)

    return write


def controls_workers(config: pytest.Config) -> bool:
    """Return True for the process that hands the tests to the workers of pytest-xdist."""
    return bool(config.pluginmanager.hasplugin("dsession"))
