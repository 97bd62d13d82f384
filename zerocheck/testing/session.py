"""Options and runs of this pytest session, which the plugin fills and the checks read."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import progress

if TYPE_CHECKING:
    from ..run.records.tally import Tally
    from .shared_run import SharedRun


class Session:
    """Options and runs of this pytest session.

    under, over: settings of lower and of higher precedence than those of a test; directory: where
    runs write; id: the same on all workers; runs: those that tests were collected for; write:
    prints a line of progress; watch: of the runs of workers.
    """

    def __init__(self) -> None:
        self.under: dict[str, Any] = {}
        self.over: dict[str, Any] = {}
        self.directory: Path | None = None
        self.id = uuid.uuid4().hex
        self.runs: list[SharedRun] = []
        self.write: progress.Write | None = None
        self.watch: progress.JournalWatch | None = None

    def place(self) -> Path:
        """Return the directory, made where pytest has no cache."""
        if self.directory is None:
            self.named().mkdir(mode=0o700, exist_ok=True)
        return self.named()

    def named(self) -> Path:
        """Return the directory, which may not be there yet."""
        return self.directory or Path(tempfile.gettempdir()) / f"zerocheck-{self.id}"


_session = Session()


def start() -> Session:
    """Begin a session in place of the one before, and return it."""
    global _session
    _session = Session()
    return _session


def current() -> Session:
    """Return the session: of this pytest, or one without options where there is none."""
    return _session


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a test's settings with those of files, which yield, and the command line's."""
    found = {**_session.under, **given, **_session.over}
    found.pop("report_dir", None)
    return found


def case_folder() -> Path:
    """Return the folder of case files of tests that judge single cases."""
    return _session.place() / "findings"


def result_of(run: SharedRun) -> Tally:
    """Return the counts of a run, made by this worker or another one."""
    write = _session.write
    handlers = () if write is None else (progress.RunLines(write),)
    return run.result(_session.place(), _session.id, _session.runs, handlers)
