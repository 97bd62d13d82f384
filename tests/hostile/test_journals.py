"""Journals from elsewhere: a report, or a refusal with the line."""

from __future__ import annotations

import lzma
from pathlib import Path

import hand_made
import msgspec
import pytest
from hostile.trials import damaged, mutated, refused, trial
from slices import sliced

from zerocheck.run.records.journal import encode

TRIALS = 200
CODES = (0, 1, 2, 130)
"""A journal without its end is that of an interrupted run, 130."""


def lines() -> list[bytes]:
    return [encode(one) for one in (*hand_made.failed()[:-1], hand_made.stale())]


@pytest.mark.parametrize("started", ["1e300", '"nan"', '"inf"', "-1e18", "1e12"])
def test_started_at_no_date(tmp_path: Path, started: str) -> None:
    """A date that no calendar has broke the report."""
    first, *rest = lines()
    path = tmp_path / "journal.ndjson"
    path.write_bytes(b"\n".join([first.replace(b"1700000000.0", started.encode()), *rest]))
    assert "is no date" in refused("report", path)


def test_unpacks_to_more_than_a_journal_can(tmp_path: Path) -> None:
    path = tmp_path / "journal.ndjson.xz"
    path.write_bytes(lzma.compress(bytes(1 << 26)))
    assert "it unpacks to over 1000 times its size" in refused("report", path)


def test_mutated(tmp_path: Path) -> None:
    """Values of other types, extremes and hostile text in the place of others."""
    path = tmp_path / "journal.ndjson"
    for number in range(sliced(TRIALS, 20) // 2):
        records = [msgspec.json.decode(line) for line in lines()]
        changed = mutated(records, f"journal {number}")
        path.write_bytes(
            b"\n".join(msgspec.json.encode(one) for one in list(changed) if _small(one))
        )
        trial("report", path, codes=CODES)


def test_damaged(tmp_path: Path) -> None:
    """Bits flipped, bytes cut, doubled, zeroed or replaced."""
    path, data = tmp_path / "journal.ndjson", b"\n".join(lines())
    for number in range(sliced(TRIALS, 20) // 2):
        path.write_bytes(damaged(data, f"journal {number}"))
        trial("report", path, codes=CODES)


def _small(record: object) -> bool:
    """JSON of msgspec takes no integer beyond 64 bits."""
    try:
        msgspec.json.encode(record)
    except (OverflowError, UnicodeEncodeError):
        return False
    return True
