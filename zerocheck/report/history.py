"""History of runs: journals that are kept in a directory, and what each run came to."""

from __future__ import annotations

import datetime
import hashlib
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ..errors import UsageError
from ..run.records.journal import read, read_bytes
from ..run.records.tally import Tally, tally
from .known_faults import known_faults
from .replace_file import replace_file

MOST = 50
"""Runs that a page shows, the last ones."""

_PATTERN = "*.ndjson.xz"


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """Outcome of a run. faults: known ones, by name; nearest: the largest share of a bound that a
    case that holds has used."""

    started: float
    torch: str
    cases: int
    findings: frozenset[str]
    faults: frozenset[str]
    seconds: float
    nearest: float

    @property
    def when(self) -> str:
        """Date and time, UTC."""
        moment = datetime.datetime.fromtimestamp(self.started, datetime.UTC)
        return moment.strftime("%Y-%m-%d %H:%M")


@dataclass(frozen=True)
class RunChange:
    """Difference of a run from the one before: `what` is new, gone, or another release."""

    when: str
    what: str
    names: tuple[str, ...]


def keep(journal: Path, directory: Path) -> Path:
    """Keep a journal, compressed. Its name begins with the date; the same run is kept once.

    Raises UsageError if the directory cannot be written.
    """
    records = read(journal)
    outcome = _outcome(tally(records))
    data = read_bytes(journal)
    stamp = datetime.datetime.fromtimestamp(outcome.started, datetime.UTC).strftime("%Y%m%d-%H%M%S")
    digest = hashlib.blake2b(data, digest_size=4).hexdigest()
    kept = directory / f"{stamp}-{digest}.ndjson.xz"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(kept, lzma.compress(data))
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror}") from error
    return kept


def past_runs(directory: Path, like: Tally, note: Callable[[str], object]) -> list[PastRun]:
    """Return the runs in a directory that had the implementations and the profile of `like`.

    The oldest first. A journal that cannot be read, such as one of another format, is left out and
    named to `note`.
    """
    found = []
    for path in sorted(filter(Path.is_file, directory.glob(_PATTERN)))[-MOST:]:
        try:
            counted = tally(read(path))
        except UsageError as error:
            note(f"left out of the history: {error}")
            continue
        if _kind(counted) == _kind(like):
            found.append(_outcome(counted))
    return sorted(found, key=lambda one: one.started)


def changes(runs: list[PastRun]) -> list[RunChange]:
    """Return what changed from run to run, the last change first."""
    found = []
    for before, after in pairwise(runs):
        for what, names in (
            ("new finding", after.findings - before.findings),
            ("finding gone", before.findings - after.findings),
            ("known fault showed up", after.faults - before.faults),
            ("known fault did not show", before.faults - after.faults),
        ):
            if names:
                found.append(RunChange(after.when, what, tuple(sorted(names))))
        if before.torch != after.torch:
            found.append(RunChange(after.when, "torch", (f"{before.torch} to {after.torch}",)))
    return found[::-1]


def _kind(counted: Tally) -> tuple[object, ...]:
    started = counted.started
    return (started.implementations, started.profile) if started is not None else ()


def _outcome(counted: Tally) -> PastRun:
    started, finished = counted.started, counted.finished
    every = counted.implementations.values()
    shares = [cell.share for one in every for cell in one.cells.values() if cell.share <= 1]
    return PastRun(
        started=started.started if started is not None else 0.0,
        torch=started.environment.torch if started is not None else "",
        cases=counted.cases,
        findings=frozenset(one.fingerprint for one in counted.findings),
        faults=frozenset(one.known.reason for one in known_faults(counted)),
        seconds=finished.seconds if finished is not None else 0.0,
        nearest=max(shares, default=0.0),
    )
