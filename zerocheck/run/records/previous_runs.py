"""Earlier runs in a report directory: kept, while foreign files are not touched.

The last runs are in `earlier/1`, `earlier/2` and so on, each with its journal and its case files;
`zerocheck report earlier/2` makes the reports of one again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from ...errors import UsageError

EARLIER = "earlier"
"""Directory of earlier runs, in a report directory."""
KEPT = 5
"""So many earlier runs are kept in a report directory."""

_ADVICE = "move it away, or give another --report-dir"
_STARTS = ("run started", "faults started")
_LINE = 1 << 20
"""Bytes of a first line that are looked at."""


class _Start(msgspec.Struct):
    type: str = ""


class _EarlierFinding(msgspec.Struct):
    type: str = ""
    case_file: str = ""


def check_name(path: Path) -> None:
    """Raise UsageError if the name belongs to a file that is no journal of zerocheck."""
    if path.is_symlink():
        raise UsageError(f"{path} is a symbolic link, and a run would take its place: {_ADVICE}")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a file: {_ADVICE}")
    if path.exists() and path.stat().st_size and not _is_journal(path):
        raise UsageError(f"{path} was not written by zerocheck: {_ADVICE}")


def check_outputs(directory: Path, names: tuple[str, ...]) -> None:
    """Raise UsageError if a report would replace a file that is not zerocheck's."""
    for name in names:
        path = directory / name
        if os.path.lexists(path) and (path.is_symlink() or not _names_us(path)):
            raise UsageError(
                f"{path} was not written by zerocheck, and a report would take its place: {_ADVICE}"
            )


def keep(journal: Path) -> None:
    """Move the journal of that name, and the case files that it lists, to `earlier`."""
    if not journal.exists():
        return
    earlier = journal.parent / EARLIER
    numbers = sorted(_numbers(earlier))
    place = earlier / str(numbers[-1] + 1 if numbers else 1)
    place.mkdir(parents=True)
    for case_file in _case_files(journal):
        (place / "findings").mkdir(exist_ok=True)
        os.replace(case_file, place / "findings" / case_file.name)
    os.replace(journal, place / journal.name)
    for number in numbers[: max(0, len(numbers) + 1 - KEPT)]:
        _remove(earlier / str(number), journal.name)


def kept_case(case_file: Path) -> Path | None:
    """Return where `keep` moved the newest case file of that name; None if there is none."""
    earlier = case_file.parent.parent / EARLIER
    places = (earlier / str(n) / "findings" for n in sorted(_numbers(earlier), reverse=True))
    return next((path for p in places if (path := p / case_file.name).is_file()), None)


def _remove(place: Path, journal: str) -> None:
    """Remove an earlier run: its journal and its case files, and directories if nothing is left."""
    for case_file in _case_files(place / journal):
        case_file.unlink()
    with suppress(OSError):
        (place / journal).unlink()
        with suppress(FileNotFoundError):
            (place / "findings").rmdir()
        place.rmdir()


def _numbers(earlier: Path) -> Iterator[int]:
    with suppress(OSError):
        for path in earlier.iterdir():
            if path.name.isdecimal():
                yield int(path.name)


def _case_files(journal: Path) -> Iterator[Path]:
    """Yield the existing case files that a journal lists, each once."""
    decoder = msgspec.json.Decoder(_EarlierFinding)
    visited = set()
    with suppress(OSError), journal.open("rb") as file:
        for line in file:
            if b'"type":"finding"' not in line:
                continue
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                name = Path(decoder.decode(line).case_file).name
                path = journal.parent / "findings" / name
                if name and name not in visited and path.is_file() and not path.is_symlink():
                    visited.add(name)
                    yield path


def _is_journal(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.readline(_LINE), type=_Start).type in _STARTS
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _names_us(path: Path) -> bool:
    return path.is_file() and (path.stat().st_size == 0 or b"zerocheck" in path.read_bytes())
