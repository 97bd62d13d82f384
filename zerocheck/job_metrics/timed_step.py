"""Figures of one step of a job, from the times of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from .records import CollectiveFigures, CollectiveTimes, RankFigures, StepTimes, TimedStep

DIGITS = 4
"""Significant digits of a figure."""

NEEDS_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that are over on no rank before every rank has begun them."""
NEEDS_ROOT = ("broadcast", "scatter")
"""Collectives that are over on no rank before the root has begun them."""
MESSAGES = ("send", "recv")
"""Between two ranks: that they differ from rank to rank says nothing."""


def timed_step(
    step: int, figures: Sequence[RankFigures], data_ranks: int | None, period: float | None
) -> TimedStep:
    """Put together what all ranks measured.

    figures: by rank; period: seconds from one step to the next.
    """
    ranks = [one.timed for one in figures]
    total = sum(map(_length, ranks)) or 1
    returned = all(call.returned for rank in ranks for call in rank.calls)
    common_clock = returned and len({rank.clock for rank in ranks}) == 1 and bool(ranks[0].clock)
    idle = tuple(map(rounded, _idle(ranks) or ())) if common_clock else ()
    overlap = _overlap(ranks) if returned else None
    reduced = all(rank.reduced for rank in ranks)
    collectives = _collectives(ranks, total, returned=returned)
    waited = sum(kind.waited or 0.0 for kind in collectives) if returned else None
    tokens = sum(one.tokens for one in figures)
    if data_ranks is not None:
        tokens = tokens * data_ranks // len(ranks)
    return TimedStep(
        step=step,
        seconds=rounded(max(map(_length, ranks)) / 1e9),
        forward=rounded(sum(rank.forward for rank in ranks) / total),
        update=rounded(sum(rank.ended - rank.reduced for rank in ranks) / total)
        if reduced
        else None,
        copied=rounded(sum(rank.copied for rank in ranks) / total),
        waited=None if waited is None else rounded(waited),
        link=rounded(max(0.0, waited - sum(idle) / len(idle)))
        if idle and waited is not None
        else None,
        overlap=None if overlap is None else rounded(overlap),
        idle=idle,
        collectives=collectives,
        tokens=tokens,
        tokens_per_second=rounded(tokens / period) if tokens and period else None,
        microbatches=max(one.microbatches for one in figures),
        memory=tuple(one.memory for one in figures),
    )


def middle_of(values: Iterable[float | None]) -> float | None:
    """Return the median of the known figures, None if there are none."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def rounded(value: float) -> float:
    """Round a figure to DIGITS digits."""
    return float(f"{value:.{DIGITS}g}")


def _collectives(
    ranks: Sequence[StepTimes], total: int, *, returned: bool
) -> tuple[CollectiveFigures, ...]:
    figures = []
    for name in {call.kind for rank in ranks for call in rank.calls}:
        calls = [[call for call in rank.calls if call.kind == name] for rank in ranks]
        sizes = [call.bytes for of_rank in calls for call in of_rank]
        waited = sum(_waited(call) for of_rank in calls for call in of_rank)
        figures.append(
            CollectiveFigures(
                kind=name,
                calls=median(map(len, calls)),
                bytes=median(sizes),
                largest=max(sizes),
                waited=rounded(waited / total) if returned else None,
            )
        )
    return tuple(sorted(figures, key=lambda one: (-(one.waited or 0), one.kind)))


def _length(step: StepTimes) -> int:
    return step.ended - step.began


def _waits(call: CollectiveTimes) -> tuple[tuple[int, int], ...]:
    """Return the spans in which the caller waited."""
    return (call.begun, call.returned), (call.stalled, call.over)


def _waited(call: CollectiveTimes) -> int:
    return sum(end - start for start, end in _waits(call))


def _overlap(ranks: Sequence[StepTimes]) -> float | None:
    """Return the share of communication time in which no caller waits.

    Waits are within the time on the way, and do not overlap: one caller waits for one collective at
    a time.
    """
    on_the_way = sum(_union((call.begun, call.over) for call in rank.calls) for rank in ranks)
    waited = sum(_waited(call) for rank in ranks for call in rank.calls)
    return 1 - waited / on_the_way if on_the_way else None


def _union(spans: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of the spans."""
    covered, reached = 0, 0
    for start, end in sorted(spans):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _idle(ranks: Sequence[StepTimes]) -> list[float] | None:
    """Return the idle time of each rank, or None if they call different collectives."""
    of = [[call for call in rank.calls if call.kind not in MESSAGES] for rank in ranks]
    if len({tuple((c.kind, c.bytes, c.ranks, c.root) for c in calls) for calls in of}) > 1:
        return None
    idle = [0] * len(ranks)
    for calls in zip(*of, strict=True):
        first = calls[0]
        if first.ranks != len(ranks):
            continue  # of a part of the ranks; StepTimes does not record which
        if first.kind in NEEDS_ALL:
            arrival = max(call.begun for call in calls)
        elif first.kind in NEEDS_ROOT and 0 <= first.root < len(ranks):
            arrival = calls[first.root].begun
        else:
            continue
        for rank, call in enumerate(calls):
            idle[rank] += sum(max(0, min(end, arrival) - start) for start, end in _waits(call))
    return [time / (_length(rank) or 1) for time, rank in zip(idle, ranks, strict=True)]
