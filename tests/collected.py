"""A handler of the engine that keeps what it is told, for tests of whole runs."""

from __future__ import annotations

from collections.abc import Callable

from zerocheck.run.records.records import Record
from zerocheck.run.records.tally import Tally, tally


class Collect(list[Record]):
    """Every record, in order."""

    def handle(self, record: Record) -> None:
        self.append(record)

    def of(self, kind: type) -> list:
        """The records of one kind."""
        return [record for record in self if isinstance(record, kind)]

    @property
    def tally(self) -> Tally:
        """What they add up to."""
        return tally(self)


Run = Callable[..., tuple[int, Collect]]
"""What fixtures give that start runs: (exit code, records)."""
