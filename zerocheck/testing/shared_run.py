"""One run behind many tests, on any number of pytest's workers.

The checks of an implementation share one run. Whichever worker of pytest-xdist comes first holds a
lock on the run's directory, runs it and writes its journal; the others read that. A worker that
would wait begins another run that tests were collected for, and comes back.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ..errors import HarnessError, UsageError
from ..run.plan.options import RunOptions
from ..run.records.journal import Handler, Journal, read
from ..run.records.records import Record
from ..run.records.tally import Tally, tally

_POLL_S = 0.05
_LOCK = ".session"


class _Ended(msgspec.Struct):
    """Content of the lock's file: the session whose run is in the directory, and its error."""

    session: str
    error: str = ""
    usage: bool = False


class SharedRun:
    """A run of one implementation that starts when its first check is called."""

    def __init__(self, label: str, given: Mapping[str, Any]) -> None:
        """Prepare a run. given: fields of RunOptions. Raises UsageError for invalid ones."""
        # Unusable options are reported when tests are collected.
        self.obligations = RunOptions(**given).obligations
        digest = hashlib.sha256(repr(sorted(given.items())).encode()).hexdigest()[:8]
        self.label = label
        self.key = f"{re.sub(r'[^A-Za-z0-9_-]', '-', label)}-{digest}"
        self._given = given
        self._handlers: tuple[Handler, ...] = ()
        self._result: Tally | Exception | None = None
        self._trace: TracebackType | None = None

    def result(
        self,
        directory: Path,
        session: str,
        others: Sequence[SharedRun] = (),
        handlers: Sequence[Handler] = (),
    ) -> Tally:
        """Return the counts of the run. A second call does not run it again, even after an error.

        directory: where runs write, each in a folder of its own; session: the same for all workers
        of one pytest session, and for no other; others: runs to begin while another worker does
        this one; handlers: of the records of a run that is begun here.
        """
        self._handlers = tuple(handlers)
        while self._result is None and not self._done(directory, session):
            if not any(run._begun(directory, session) for run in others):
                time.sleep(_POLL_S)
        if isinstance(self._result, Exception):
            # As it was first raised: each raise adds to the traceback.
            raise self._result.with_traceback(self._trace)
        assert self._result is not None
        return self._result

    def _done(self, directory: Path, session: str) -> bool:
        """Take the result: run it, or read another worker's. False while another one runs it."""
        with _lock(directory / self.key) as file:
            if file is None:
                return False
            ended = _read(file)
            if ended is None or ended.session != session:
                self._start(directory / self.key, file, session)
            elif ended.error:
                self._result = (UsageError if ended.usage else HarnessError)(ended.error)
            else:
                self._result = tally(read(directory / self.key / "journal.ndjson"))
        return True

    def _begun(self, directory: Path, session: str) -> bool:
        """Run it, unless it was run or another worker is at it."""
        if self._result is not None:
            return False
        with _lock(directory / self.key) as file:
            if file is None:
                return False
            ended = _read(file)
            if ended is not None and ended.session == session:
                return False
            self._start(directory / self.key, file, session)
        return True

    def _start(self, directory: Path, file: int, session: str) -> None:
        """Run it, and record the result in the lock's file."""
        ended = _Ended(session)
        try:
            self._result = self._run(directory)
        except Exception as error:
            self._result, self._trace = error, error.__traceback__
            ended.error = str(error) or type(error).__name__
            ended.usage = isinstance(error, UsageError)
        os.ftruncate(file, 0)
        os.pwrite(file, msgspec.json.encode(ended), 0)

    def _run(self, directory: Path) -> Tally:
        from ..report.write import write_reports
        from ..run import engine
        from ..run.execute.environment import untested_versions

        if untested_versions():
            warnings.warn(untested_versions(), stacklevel=2)
        collected = _Collected()
        with Journal(directory / "journal.ndjson") as journal:
            options = RunOptions(report_dir=directory, **self._given)
            engine.run(options, (journal, collected, *self._handlers))
        write_reports(collected.records, directory)
        return tally(collected.records)


class _Collected:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def handle(self, record: Record) -> None:
        self.records.append(record)


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[int | None]:
    """The locked file of a run's directory, or None while another process holds it.

    The kernel frees the lock of a process that dies.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield file
    finally:
        os.close(file)


def _read(file: int) -> _Ended | None:
    """Read the record of the last run; None if it did not end."""
    try:
        return msgspec.json.decode(os.pread(file, os.fstat(file).st_size, 0), type=_Ended)
    except msgspec.DecodeError:
        return None
