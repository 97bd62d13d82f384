"""Resumed cases per second: the textbook sharders save on 2 ranks, and load on 3."""

from __future__ import annotations

import statistics
import time

import msgspec
from benchmarks.measuring import Show, spread, statuses_of, table, warm_pool

from zerocheck.case.resume import draw_resumed
from zerocheck.case.schema import Case
from zerocheck.case.segments import only_loads
from zerocheck.contract.loading import load
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.rank_requests import describe
from zerocheck.run.plan.fixed_fields import fixed_fields
from zerocheck.run.plan.options import RunOptions
from zerocheck.run.plan.plan import PlannedCase

ROUNDS = 5
PER_ROUND = 10
"""Cases in each round, one behind the other as in a run; their mean counts."""
SAVING, LOADING = 2, 3
NAMES = ("zero1", "zero2", "zero3")
TARGET = 2.0
"""Resumed cases per second, of each stage."""


def _cases(pool: Pool) -> list[Case]:
    """Drawn as a run draws them, for all rounds; each loads once, what is whole, at all stages."""
    count = (ROUNDS + 1) * PER_ROUND
    fixed = fixed_fields(RunOptions(implementations=NAMES), describe(pool, NAMES[0]))
    drawn = draw_resumed(2 * count, seed=0, world_sizes=(SAVING,), fixed=fixed)
    whole = [
        msgspec.structs.replace(
            case, resume=(msgspec.structs.replace(case.resume[0], mesh=(LOADING,)),)
        )
        for case in drawn
        if not any(only_loads(case, 1 + number) for number in range(len(case.resume)))
        if all(load(name).supports(case) is None for name in NAMES)
    ]
    return whole[:count]


def test_resume(show: Show) -> None:
    """Rounds alternate between the stages, so that whatever else the machine does meets all."""
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    with warm_pool() as pool:
        cases = _cases(pool)
        for number in range(ROUNDS + 1):
            turn = cases[number * PER_ROUND : (number + 1) * PER_ROUND]
            for name in NAMES:
                started = time.perf_counter()
                statuses = list(statuses_of(pool, [PlannedCase(name, case) for case in turn]))
                assert statuses.count("holds") == PER_ROUND, statuses
                if number:  # the first round warms the ranks of both sizes
                    seconds[name].append((time.perf_counter() - started) / PER_ROUND)
    every = [second for name in NAMES for second in seconds[name]]
    rows = [
        [name, spread(times, digits=3), f"{1 / statistics.median(times):.1f}"]
        for name, times in (*seconds.items(), ("all", every))
    ]
    title = (
        f"One resumed case, saved on {SAVING} ranks and loaded on {LOADING}, judged; median "
        f"(quartiles) of {ROUNDS} rounds of {PER_ROUND}"
    )
    show(table(title, ["", "seconds", "cases/s"], rows))
    for times in seconds.values():
        assert 1 / statistics.median(times) >= TARGET
