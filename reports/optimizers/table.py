"""Table of journals, one for each optimizer: `python table.py adam/journal.ndjson ...`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tabulate import tabulate

from zerocheck.run.records.journal import read
from zerocheck.run.records.records import CaseFinished, Record

COLUMNS = ("holds", "bit for bit", "unsupported", "known fault", "anything else")


def main() -> None:
    """Print a row for each optimizer and implementation, and the reasons of what is unsupported."""
    rows: list[list[object]] = []
    reasons: Counter[tuple[str, str, str]] = Counter()
    for path in map(Path, sys.argv[1:]):
        records = read(path)
        kind = optimizer(records)
        for name in dict.fromkeys(one.implementation for one in cases(records)):
            mine = [one for one in cases(records) if one.implementation == name]
            count = Counter(map(column, mine))
            exact = sum(column(one) == "holds" and not estimated(one) for one in mine)
            rows.append(
                [kind, name, *(exact if one == "bit for bit" else count[one] for one in COLUMNS)]
            )
            reasons.update((kind, name, one.reason) for one in mine if refused(one))
    print(tabulate(rows, ["optimizer", "implementation", *COLUMNS], tablefmt="github"))
    print()
    words = [[*key, count] for key, count in sorted(reasons.items()) if "of DTensors" in key[2]]
    print(tabulate(words, ["optimizer", "implementation", "what torch says", "cases"], "github"))


def optimizer(records: Iterable[Record]) -> str:
    """Return the optimizer of every case of a run."""
    return next(one.case.optimizer.kind for one in cases(records))


def cases(records: Iterable[Record]) -> list[CaseFinished]:
    """Return the finished cases of a run."""
    return [one for one in records if isinstance(one, CaseFinished)]


def refused(case: CaseFinished) -> bool:
    """Return True for a case that could not be run."""
    return case.status == "unsupported"


def estimated(case: CaseFinished) -> bool:
    """Return True if a bound of an update was an estimate."""
    return case.judgement is not None and "update" in case.judgement.estimated


def column(case: CaseFinished) -> str:
    """Return the column in which a case counts."""
    if case.status in ("holds", "unsupported"):
        return case.status
    return "known fault" if case.known else "anything else"


if __name__ == "__main__":
    main()
