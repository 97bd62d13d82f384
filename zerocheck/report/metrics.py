"""Text of the runtime metrics of timed cases."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from ..run.records.metrics import Metrics, Paces
from ..run.records.tally import ImplementationTally

TITLE = "How it ran"
EXPLAINED = (
    "Some cases take their steps once more, with nothing observed but times. These are tiny models "
    "on processors that may be busy, so seconds say little; shares and counts say more, and no "
    "verdict hangs on any. Medians over the steps after a warm-up, then over cases. Shares are of "
    "the step: the time that callers wait in collectives of a kind, and `idle`, the part of it in "
    "which a rank that is needed has not come yet, mean over ranks. `overlap` is the share of the "
    "time of collectives on their way in which the caller does not wait; on a CPU they are moved "
    "by threads on the same cores, so hidden is not free. `gathered` is the largest all-gather "
    "over all parameters; `allocated` and `reserved` are what an accelerator's allocator reports. "
    "A dash: not there, or not observed."
)
HEADERS = (
    "implementation", "ranks", "cases", "steps", "calls", "bytes", "all-gather", "reduce-scatter",
    "all-reduce", "others", "overlap", "idle", "gathered", "forward", "after reduction", "ms",
    "tokens/s", "allocated", "reserved",
)  # fmt: skip
NAMED = ("all_gather", "reduce_scatter", "all_reduce")
"""Kinds with a column of their own."""
NO_LIMIT = (
    "Idle time, copies between devices and slow collectives have no limit that could be derived: "
    "the figures stand here by size, without a verdict."
)

Implementations = dict[str, ImplementationTally]


def rows(implementations: Implementations) -> list[list[str]]:
    """Return a row for each implementation and number of ranks; none if nothing was timed."""
    return [[name, *_row(one)] for name, one in _each(implementations)]


def _row(one: Paces) -> list[str]:
    others = {kind.kind for _, pace in one.cases for kind in pace.kinds} - set(NAMED)
    seconds = one.middle(lambda pace: pace.seconds)
    return [
        str(one.ranks),
        str(len(one.cases)),
        str(one.steps),
        _count(one.middle(lambda pace: pace.calls)),
        _count(one.bytes),
        *(_percent(one.share(kind)) for kind in NAMED),
        _percent(one.share(*others)),
        _percent(one.middle(lambda pace: pace.overlap)),
        _percent(one.idle),
        _percent(one.gathered),
        _percent(one.middle(lambda pace: pace.forward)),
        _percent(one.middle(lambda pace: pace.update)),
        "–" if seconds is None else f"{seconds * 1000:.3g}",
        _count(one.tokens_per_second),
        _count(one.allocated),
        _count(one.reserved),
    ]


def lines(implementations: Implementations) -> list[str]:
    """Return lines for the console: one for each implementation, then one for each pattern.

    The first are of the most ranks that were timed.
    """
    text = []
    for name, implementation in implementations.items():
        metrics = implementation.metrics
        if metrics.paces:
            text.append(_line(name, metrics.paces[max(metrics.paces)]))
    return text + pattern_lines(implementations)


def _line(name: str, one: Paces) -> str:
    calls = one.middle(lambda pace: pace.calls)
    parts = [f"{_count(calls)} collective{'s' if calls != 1 else ''} in a step"]
    waiting = one.middle(lambda pace: pace.waiting)
    if waiting is not None:
        parts.append(f"{_percent(waiting)} of it waiting in them")
    overlap, idle = one.middle(lambda pace: pace.overlap), one.idle
    if overlap is not None:
        parts.append(f"overlap {_percent(overlap)}")
    if idle is not None:
        parts.append(f"idle {_percent(idle)}")
    ranks = f"{one.ranks} rank{'s' if one.ranks > 1 else ''}"
    return f"{name}, {ranks}: {', '.join(parts)} ({_cases(len(one.cases))} timed)"


def pattern_lines(implementations: Implementations) -> list[str]:
    """Return hints from the timings, a line for each pattern of each implementation."""
    return [
        f"{name}: {sentence} (in {m.shown[pattern]} of {_cases(m.cases)} timed)"
        for name, implementation in implementations.items()
        if (m := implementation.metrics)
        for pattern, sentence in m.patterns.items()
    ]


def ranked_lines(implementations: Implementations) -> list[str]:
    """Return figures without a limit: copies between devices, then ranks that are waited for.

    Each kind has the largest first.
    """
    waits: list[tuple[float, str]] = []
    copies: list[tuple[float, str]] = []
    for name, one in _each(implementations):
        idle = one.idle_of
        if len(idle) > 1:
            late = min(range(len(idle)), key=idle.__getitem__)
            others = sum(idle) - idle[late]
            mean = others / (len(idle) - 1)
            text = (
                f"{name}, {one.ranks} ranks: rank {late} is waited for most: the others are idle "
                f"{_percent(mean)} of the step, it {_percent(idle[late])}"
            )
            waits.append((mean, text))
        copied = one.middle(lambda pace: pace.copied)
        if copied:
            text = f"copies between devices (offload) take {_percent(copied)} of the step"
            copies.append((copied, f"{name}, {one.ranks} ranks: {text}"))
    return [line for found in (copies, waits) for _, line in sorted(found, reverse=True)]


def checkpoint_rows(implementations: Implementations) -> list[list[str]]:
    """Return seconds of saves and loads, for implementations that have any."""
    return [
        [name, *_seconds(i.metrics.saves), *_seconds(i.metrics.loads)]
        for name, i in implementations.items()
        if i.metrics.saves or i.metrics.loads
    ]


def peak_rows(implementations: Implementations) -> list[list[str]]:
    """Return peak bytes of measured cases, a row for each implementation and number of ranks."""
    return [
        [name, str(ranks), str(len(sizes)), _count(median(sizes)), _count(max(sizes))]
        for name, implementation in implementations.items()
        for ranks, sizes in sorted(implementation.metrics.peaks.items())
    ]


PEAK_HEADERS = ("implementation", "ranks", "cases measured", "median, bytes", "most, bytes")
CHECKPOINT_HEADERS = ("implementation", "saves", "median, s", "loads", "median, s")


def broken_lines(implementations: Implementations) -> list[str]:
    """Return the number of cases that could not be timed, and the reason of the first one.

    A line for each implementation.
    """
    return [
        f"{name}: {_cases(len(i.metrics.broken))} could not be timed: {i.metrics.broken[0]}"
        for name, i in implementations.items()
        if i.metrics.broken
    ]


def _seconds(values: list[float]) -> list[str]:
    return [str(len(values)), f"{median(values):.3g}" if values else "–"]


def _cases(count: int) -> str:
    return f"{count} case{'s' if count != 1 else ''}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _each(implementations: Implementations) -> Iterator[tuple[str, Paces]]:
    for name, implementation in implementations.items():
        for ranks in sorted(implementation.metrics.paces):
            yield name, implementation.metrics.paces[ranks]


def as_data(metrics: Metrics) -> dict[str, Any]:
    """Return the metrics for the JSON report."""
    return {
        "by_world_size": [_data(metrics.paces[ranks]) for ranks in sorted(metrics.paces)],
        "patterns": [
            {"text": text, "cases": metrics.shown[pattern], "of": metrics.cases}
            for pattern, text in metrics.patterns.items()
        ],
        "not_timed": metrics.broken,
        "measured_peaks": [
            {"world_size": ranks, "cases": len(sizes), "median": median(sizes), "most": max(sizes)}
            for ranks, sizes in sorted(metrics.peaks.items())
        ],
        "save_seconds": _statistics(metrics.saves),
        "load_seconds": _statistics(metrics.loads),
    }


def _data(one: Paces) -> dict[str, Any]:
    kinds = sorted({kind.kind for _, pace in one.cases for kind in pace.kinds})
    return {
        "world_size": one.ranks,
        "cases": len(one.cases),
        "steps": one.steps,
        "calls": one.middle(lambda pace: pace.calls),
        "bytes": one.bytes,
        "shares": {kind: one.share(kind) for kind in kinds},
        "overlap": one.middle(lambda pace: pace.overlap),
        "idle": one.idle,
        "idle_by_rank": one.idle_of,
        "gathered": one.gathered,
        "forward": one.middle(lambda pace: pace.forward),
        "after_reduction": one.middle(lambda pace: pace.update),
        "copied": one.middle(lambda pace: pace.copied),
        "step_seconds": one.middle(lambda pace: pace.seconds),
        "tokens_per_second": one.tokens_per_second,
        "peak_allocated": one.allocated,
        "peak_reserved": one.reserved,
    }


def _statistics(values: list[float]) -> dict[str, Any]:
    return {"count": len(values), "median": median(values) if values else None}
