"""What observing and judging cost: the quick profile's cases against their steps bare."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

import psutil
from benchmarks.measuring import Show, bare, observed, planned, spread, table, warm_pool
from benchmarks.profiling import TIMES, judge_timed

from zerocheck.ranks.pool import Pool
from zerocheck.run.plan.options import RunOptions
from zerocheck.run.plan.plan import PlannedCase

ROUNDS = 3
CASES = 16
"""Per implementation, so that all nine take about four minutes."""
TARGET_RATIO = 2.0
PROFILED = 24
"""Cases per implementation in the profile."""


def test_cost(show: Show) -> None:
    """Observed and bare take turns on each case, after one of each to warm up."""
    options = RunOptions(profile="quick", max_cases=CASES)
    ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
    work: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    with warm_pool() as pool:
        for item in planned(pool, options):
            key = item.implementation, item.case.world_size
            ratio = _ratio(pool, item, work[key])
            if ratio is not None:
                ratios[key].append(ratio)
    sizes = options.world_sizes
    rows = []
    for name in options.implementations:
        own = [ratios[name, size] for size in sizes]
        rows.append([name, *map(_median, own), spread([r for rs in own for r in rs])])
    columns = [[r for n in options.implementations for r in ratios[n, size]] for size in sizes]
    every = [ratio for found in ratios.values() for ratio in found]
    rows.append(["all", *map(_median, columns), spread(every)])
    title = (
        f"(observed and judged) / bare, wall, {len(every)} cases of the quick profile; "
        f"each case the median of {ROUNDS}; median over cases (quartiles)"
    )
    show(table(title, ["", *(f"W = {size}" for size in sizes), "all"], rows))
    rows = [
        [
            name,
            *(_of_sums(work, (name,), (size,)) for size in sizes),
            _of_sums(work, (name,), sizes),
        ]
        for name in options.implementations
    ]
    names = options.implementations
    rows.append(
        ["all", *(_of_sums(work, names, (size,)) for size in sizes), _of_sums(work, names, sizes)]
    )
    title = "The same as processor time of all ranks and the judge, ratio of the sums"
    show(table(title, ["", *(f"W = {size}" for size in sizes), "all"], rows))
    assert statistics.median(every) <= TARGET_RATIO


def _of_sums(
    work: Mapping[tuple[str, int], Sequence[float]], names: Sequence[str], sizes: Sequence[int]
) -> str:
    """Processor time observed and judged over bare, for these implementations and sizes."""
    sums = [sum(work[n, s][kind] for n in names for s in sizes) for kind in (0, 1)]
    return f"{sums[0] / sums[1]:.2f}" if sums[1] else "-"


def _worked(pool: Pool) -> float:
    """Processor seconds so far of this process and all ranks, all threads."""
    processes = [psutil.Process(), *psutil.Process(pool.zygote_pid).children()]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _ratio(pool: Pool, item: PlannedCase, work: list[float]) -> float | None:
    """Wall, the median of the rounds; None where the implementation does not support the case.

    work: processor seconds observed and bare, to be added to.
    """
    wholes, alone = [], []
    for number in range(ROUNDS + 1):
        before = _worked(pool) if number else 0.0
        seconds, outcome = observed(pool, item)
        if outcome.status == "unsupported":
            return None
        assert outcome.status == "holds", outcome
        between = _worked(pool)
        steps, _ = bare(pool, item)
        if number:
            work[0] += between - before
            work[1] += _worked(pool) - between
            wholes.append(seconds)
            alone.append(steps)
    return statistics.median(wholes) / statistics.median(alone)


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else "-"


def test_profile(show: Show) -> None:
    """Where the time goes: the ranks bare and observed, what is between, and the judge."""
    options = RunOptions(profile="quick", max_cases=PROFILED)
    ranks: dict[str, dict[str, float]] = {
        "bare": defaultdict(float),
        "observed": defaultdict(float),
    }
    judge: dict[str, float] = defaultdict(float)
    walls: dict[str, float] = defaultdict(float)
    count = 0
    with warm_pool("benchmarks.profiling:run") as pool:
        for item in planned(pool, options):
            if observed(pool, item)[1].status == "unsupported":
                continue
            bare(pool, item)
            count += 1
            _times(pool, item)
            wall, inside = bare(pool, item)
            _add(ranks["bare"], _times(pool, item))
            walls["bare: ranks"] += inside
            walls["bare: between submission and reply"] += wall - inside
            with judge_timed() as parts:
                wall, outcome = observed(pool, item)
            _add(ranks["observed"], _times(pool, item))
            _add(judge, parts)
            walls["observed: ranks"] += outcome.seconds - outcome.judge_seconds
            walls["observed: between submission and reply"] += wall - outcome.seconds
            walls["observed: judge"] += outcome.judge_seconds
    show(table(f"Wall ms per case, mean of {count}", ["", "ms"], _rows(walls, count)))
    names = sorted(set().union(*ranks.values()), key=lambda name: -ranks["observed"][name])
    both = [[ranks[kind][name] for kind in ("bare", "observed")] for name in names]
    rows = [
        [name, *(f"{1e3 * value / count:.1f}" for value in (*pair, pair[1] - pair[0]))]
        for name, pair in zip(
            (*names, "all"), (*both, [sum(column) for column in zip(*both, strict=True)]),
            strict=True,
        )
    ]  # fmt: skip
    title = "Processor ms per case, all ranks together"
    show(table(title, ["in the ranks", "bare", "observed", "extra"], rows))
    show(table("Wall ms per case", ["in the judge", "ms"], _rows(judge, count)))


def _rows(seconds: Mapping[str, float], count: int) -> list[list[str]]:
    ordered = sorted(seconds.items(), key=lambda pair: -pair[1])
    rows = [[name, f"{1e3 * value / count:.2f}"] for name, value in ordered]
    return [*rows, ["all", f"{1e3 * sum(seconds.values()) / count:.2f}"]]


def _times(pool: Pool, item: PlannedCase) -> dict[str, float]:
    """Processor seconds by section, summed over the ranks of the case's team."""
    result = pool.wait(pool.submit(item.case.world_size, TIMES))
    total: dict[str, float] = defaultdict(float)
    for payload in result.payloads:
        _add(total, json.loads(payload or b"{}"))
    result.release()
    return total


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for name, seconds in more.items():
        total[name] += seconds
