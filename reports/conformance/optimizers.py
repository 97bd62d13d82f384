"""Print the table of optimizers.md from the journals of runs, one for each optimizer.

    python reports/conformance/optimizers.py DIR

DIR/NAME/journal.ndjson is of `zerocheck run ... --optimizer NAME --report-dir DIR/NAME`.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from tabulate import tabulate

from zerocheck.run.records.journal import read
from zerocheck.run.records.records import CaseFinished

NAMES = ("cases", "hold", "exact", "estimated", "known", "else", "unsupported")


def rows(name: str, journal: Path) -> list[list[object]]:
    """Return a row for each implementation of a run."""
    counts: dict[str, Counter[str]] = {}
    reasons: dict[str, Counter[str]] = {}
    for record in read(journal):
        if not isinstance(record, CaseFinished):
            continue
        of = counts.setdefault(record.implementation, Counter())
        of["cases"] += 1
        if record.status == "unsupported":
            of["unsupported"] += 1
            words = record.reason.partition(":")[0]
            reasons.setdefault(record.implementation, Counter())[words] += 1
        elif record.status == "holds":
            of["hold"] += 1
        elif record.known and wrong(record) <= {*record.known}:
            of["known"] += 1
        else:
            of["else"] += 1
        judgement = record.judgement
        if judgement is not None and judgement.statuses.get("update") == "holds":
            of["estimated" if "update" in judgement.estimated else "exact"] += 1
    made = []
    for implementation, of in counts.items():
        ((reason, times),) = reasons.get(implementation, Counter({"": 0})).most_common(1)
        most = f"{reason} ({times})" if reason else ""
        made.append([name, implementation, *(of[one] for one in NAMES), most])
    return made


def wrong(record: CaseFinished) -> set[str]:
    """Return the obligations that a case violates."""
    return {one.obligation for one in record.judgement.violations} if record.judgement else set()


if __name__ == "__main__":
    folders = sorted(Path(sys.argv[1]).glob("*/journal.ndjson"))
    table = [row for one in folders for row in rows(one.parent.name, one)]
    head = ["optimizer", "implementation", *NAMES, "the commonest reason"]
    print(tabulate(table, head, tablefmt="github"))
