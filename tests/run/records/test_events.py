"""The bus: every record, to every handler, in order."""

from __future__ import annotations

import pytest
from hand_made import held

from zerocheck.run.records.journal import Bus
from zerocheck.run.records.records import Record


class _Noting:
    def __init__(self, name: str, notes: list[tuple[str, Record]]) -> None:
        self.name = name
        self.notes = notes

    def handle(self, record: Record) -> None:
        self.notes.append((self.name, record))


class _Failing:
    def handle(self, record: Record) -> None:
        raise OSError("disk full")


def test_order() -> None:
    notes: list[tuple[str, Record]] = []
    bus = Bus([_Noting("journal", notes), _Noting("progress", notes)])
    for record in held(1):
        bus.handle(record)
    assert notes == [(name, r) for r in held(1) for name in ("journal", "progress")]


def test_nothing_is_shown_that_was_not_written() -> None:
    notes: list[tuple[str, Record]] = []
    with pytest.raises(OSError, match="disk full"):
        Bus([_Failing(), _Noting("progress", notes)]).handle(held()[0])
    assert not notes
