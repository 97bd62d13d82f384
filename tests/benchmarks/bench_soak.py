"""A thousand cases in one pool: nothing grows, in the parent, the zygote or any rank.

50 different cases, twenty times. Were all different, memory would grow by what torch keeps per
shape: oneDNN its convolutions, DTensor how it shards each operator. What is sought here is what
zerocheck, an implementation or the pool would keep of every case. A heap takes about ten times
the same cases until its fragments fill no more pages: the trend is that of the second half.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import psutil
from benchmarks.measuring import Show, planned, statuses_of, table, warm_pool

from zerocheck.ranks.pool import Pool
from zerocheck.run.plan.options import RunOptions

CASES = 1000
DISTINCT = 50
SAMPLE = 50
SETTLED = 200
"""By then every team lives, and every case has run four times."""
TREND = 4.0
"""KiB per case that a process may grow by in the second half: the slope of a line through its
samples. A rank runs about every sixth case, so that 24 KiB kept of each of its cases are seen."""
SHARE, CONSTANT = 0.05, 4096.0
"""How far above its size at SETTLED a process may end: 5 % and 4 MiB."""

Sample = dict[str, dict[str, float]]
"""process -> what -> value; memory in KiB."""


def test_soak(show: Show) -> None:
    """Memory stays flat; processes, threads, descriptors and sockets become no more."""
    options = RunOptions(profile="quick")
    samples: dict[int, Sample] = {}
    statuses: dict[str, int] = {}
    with warm_pool() as pool:
        look = _looker(pool)
        distinct = planned(pool, options)[:DISTINCT]
        assert len(distinct) == DISTINCT
        cases = distinct * (CASES // DISTINCT)
        for number, status in enumerate(statuses_of(pool, cases), start=1):
            statuses[status] = statuses.get(status, 0) + 1
            if number % SAMPLE == 0:
                samples[number] = look()
    show(table("Samples over a run of many cases", _HEADERS, _rows(samples)))
    show(f"{len(cases)} cases: {statuses}")
    assert set(statuses) <= {"holds", "unsupported"}
    problems, trends = _grown({n: s for n, s in samples.items() if n >= SETTLED})
    headers = ["process", "KiB at 200", "KiB at the end", "KiB per case, second half"]
    show(table(f"From case {SETTLED} on", headers, trends))
    assert not problems, "\n".join(problems)


def _looker(pool: Pool) -> Callable[[], Sample]:
    parent = psutil.Process()

    def look() -> Sample:
        found = {"parent": _of(parent), "zygote": _of(psutil.Process(pool.zygote_pid))}
        for size, pids in sorted(pool.rank_pids.items()):
            for rank, pid in enumerate(pids):
                found[f"W{size} rank {rank}"] = {**_of(psutil.Process(pid)), "pid": pid}
        found["parent"]["processes"] = len(parent.children(recursive=True))
        return found

    return look


def _of(process: psutil.Process) -> dict[str, float]:
    with process.oneshot():
        memory = process.memory_full_info()
        return {
            "kib": memory.rss / 1024,
            # Pages of its own: rss counts those shared with the zygote and the arenas, too.
            "own": memory.uss / 1024,
            "threads": process.num_threads(),
            "descriptors": process.num_fds(),
            "sockets": len(process.net_connections("all")),
        }


_HEADERS = ["cases", "parent MiB", "zygote MiB", "ranks, MiB: median", "largest", "own, all",
            "processes", "threads", "descriptors", "sockets"]  # fmt: skip


def _rows(samples: dict[int, Sample]) -> list[list[str]]:
    rows = []
    for number, sample in samples.items():
        ranks = [one for name, one in sample.items() if name.startswith("W")]
        memory = [one["kib"] / 1024 for one in ranks]
        numbers = [
            sample["parent"]["kib"] / 1024,
            sample["zygote"]["kib"] / 1024,
            statistics.median(memory),
            max(memory),
            sum(one["own"] for one in ranks) / 1024,
        ]
        counts = [sample["parent"]["processes"]]
        for what in ("threads", "descriptors", "sockets"):
            counts.append(sum(one[what] for one in sample.values()))
        rows.append([str(number), *(f"{n:.1f}" for n in numbers), *(f"{n:.0f}" for n in counts)])
    return rows


def _grown(samples: dict[int, Sample]) -> tuple[list[str], list[list[str]]]:
    """What grew, in words, and each process's trend."""
    numbers = list(samples)
    first, last = samples[numbers[0]], samples[numbers[-1]]
    problems: list[str] = []
    rows: list[list[str]] = []
    if first.keys() != last.keys():
        problems.append(f"other processes: {sorted(first)} became {sorted(last)}")
    for name in first.keys() & last.keys():
        values = [sample.get(name, first[name])["kib"] for sample in samples.values()]
        half = [number for number in numbers if number >= CASES // 2]
        slope = statistics.linear_regression(half, values[-len(half) :]).slope
        rows.append([name, f"{values[0]:.0f}", f"{values[-1]:.0f}", f"{slope:+.2f}"])
        if slope > TREND:
            problems.append(f"{name} grows by {slope:.1f} KiB per case")
        if values[-1] > values[0] * (1 + SHARE) + CONSTANT:
            problems.append(f"{name} grew from {values[0]:.0f} to {values[-1]:.0f} KiB")
        for what in ("pid", "processes", "threads", "descriptors", "sockets"):
            before, after = first[name].get(what, 0.0), last[name].get(what, 0.0)
            if after > before or (what == "pid" and after != before):
                problems.append(f"{name}: {what} were {before}, became {after}")
    return problems, sorted(rows)
