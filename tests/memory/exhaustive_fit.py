"""Search for what fits, and simulate every choice on every number of ranks: the same answer?

    python tests/memory/exhaustive_fit.py llama3-8b 80GiB 8

It takes minutes, so no test runs it; test_fit_search.py does the same with small models.
"""

from __future__ import annotations

import sys
import time

from zerocheck.memory.fit.assemble import fit
from zerocheck.memory.fit.result import FitReport
from zerocheck.memory.setup import Setup
from zerocheck.sizes import parse_size


def answer(report: FitReport) -> list[tuple[str, int, int, float]]:
    return [(row.command, row.smallest, row.peak.total, row.sent) for row in report.rows]


def main(model: str, size: str, most: str) -> int:
    base, limit = Setup(model=model), parse_size(size)
    reports = []
    for exhaustive in (False, True):
        begun, worked = time.monotonic(), time.process_time()
        report = fit(base, limit, most_ranks=int(most), exhaustive=exhaustive)
        print(
            f"{'exhaustive' if exhaustive else 'search'}: {report.simulations} points, "
            f"{time.monotonic() - begun:.0f} s, {time.process_time() - worked:.0f} s of processor"
        )
        print(report.advice[0], *map(str, answer(report)), sep="\n  ")
        reports.append(report)
    same = answer(reports[0]) == answer(reports[1]) and reports[0].taken == reports[1].taken
    print("the same answer" if same else "ANOTHER ANSWER")
    return not same


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
