"""Whole runs, and a handler of the engine that keeps what it is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerocheck.case.schema import Case
from zerocheck.ranks.pool import Pool
from zerocheck.run.engine import run
from zerocheck.run.plan.options import RunOptions
from zerocheck.run.records.records import CaseFinished, Record
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


def whole_run(pool: Pool, *implementations: str, **options: Any) -> tuple[int, Collect]:
    """Run them with these options: (exit code, records)."""
    records = Collect()
    asked = RunOptions(implementations=implementations, **options)
    return run(asked, [records], ranks=pool), records


class RunsOf:
    """Runs on 2 and 3 ranks that search for nothing smaller, and the records of the last one."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self.records = Collect()

    def __call__(self, *implementations: str, **options: Any) -> Tally:
        self.records = Collect()
        usual = {"world_sizes": (2, 3), "max_cases": 2, "shrink": False}
        asked = {**usual, "report_dir": self.folder, **options}
        run(RunOptions(implementations=implementations, **asked), [self.records], ranks=self.pool)
        return self.records.tally

    def cases(self) -> list[Case]:
        return [finished.case for finished in self.records.of(CaseFinished)]
