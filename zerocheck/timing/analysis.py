"""Pace of steps, of a case or of a job, from the times of the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from statistics import median

import msgspec

from ..case.schema import Case
from ..case.shapes import ITEMSIZE, learning, parameter_dtypes, parameter_shapes
from ..protocol.measurements import CollectiveTimes, StepTimes, Timed
from .pace import REDUCING, Kind, Pace

DIGITS = 4
"""That are written down of a figure."""

NEEDS_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that are over on no rank before every rank has begun them."""
NEEDS_ROOT = ("broadcast", "scatter")
"""Collectives that are over on no rank before the root has begun them."""
MESSAGES = ("send", "recv")
"""Between two ranks: that they differ from rank to rank says nothing."""

USED = ("bucket", "wrap")
"""Fields of `case.sharding` that `patterns` asks for."""


def pace_of(case: Case, ranks: Sequence[Timed]) -> Pace | None:
    """Compute the figures of one case, or None if no step counts. ranks[r]: times of rank r."""
    pace = pace_of_steps(ranks)
    if pace is None:
        return None
    return msgspec.structs.replace(
        pace,
        tokens=_tokens(case),
        alone=alone(case, [c for c in ranks[0].steps[-1].calls if c.kind in REDUCING]),
        obeys=tuple(word for word in USED if word in ranks[0].options),
    )


def pace_of_steps(ranks: Sequence[Timed]) -> Pace | None:
    """Compute what follows from the times alone: all but `tokens`, `alone` and `obeys`."""
    # steps[i][r]: step i on rank r
    steps = list(zip(*(one.steps for one in ranks), strict=True))
    if not steps:
        return None
    returned = all(call.returned for step in steps for rank in step for call in rank.calls)
    common_clock = returned and len({one.clock for one in ranks}) == 1 and bool(ranks[0].clock)
    idle = [_idle(step) for step in steps] if common_clock else [None]
    known = [one for one in idle if one is not None]
    update = [_update(step) for step in steps]
    overlap = [share for step in steps if (share := _overlap(step)) is not None]
    return Pace(
        steps=len(steps),
        seconds=rounded(median(max(map(_length, step)) for step in steps) / 1e9),
        forward=_middle(sum(rank.forward for rank in step) / _all(step) for step in steps),
        update=_middle(one for one in update if one is not None) if None not in update else None,
        copied=_middle(sum(rank.copied for rank in step) / _all(step) for step in steps),
        kinds=_kinds(steps, returned=returned),
        overlap=_middle(overlap) if returned and overlap else None,
        idle=tuple(_middle(one[rank] for one in known) for rank in range(len(ranks)))
        if len(known) == len(steps)
        else (),
        allocated=_most(one.allocated for one in ranks),
        reserved=_most(one.reserved for one in ranks),
    )


def _tokens(case: Case) -> int:
    """Return the positions of one step; 0 for the user's own batches, whose content is unknown."""
    if case.model.user is not None:
        return 0
    return case.data.batch * case.data.length * case.training.microbatches * case.world_size


def alone(case: Case, calls: Iterable[CollectiveTimes]) -> int:
    """Count the trained parameter tensors with a collective of their own.

    A call is a tensor's own if it has just the tensor's bytes, in a reduce-scatter padded to a
    multiple of the ranks. Each call counts once.
    """
    ranks = case.axes.size("shard")
    shapes, dtypes = parameter_shapes(case.model), parameter_dtypes(case.model)
    free = Counter((call.kind == "reduce_scatter", call.bytes) for call in calls)
    found = 0
    for name in learning(case):
        elements, size = prod(shapes[name]), ITEMSIZE[dtypes[name]]
        padded = -(-elements // ranks) * ranks
        for key in ((False, elements * size), (True, padded * size)):
            if elements and free[key]:
                free[key] -= 1
                found += 1
                break
    return found


def _kinds(steps: Sequence[Sequence[StepTimes]], *, returned: bool) -> tuple[Kind, ...]:
    names = {call.kind for step in steps for rank in step for call in rank.calls}
    kinds = []
    for name in names:
        of = [[[c for c in rank.calls if c.kind == name] for rank in step] for step in steps]
        sizes = [call.bytes for step in of for rank in step for call in rank]
        shares = [
            sum(_waited(call) for rank in calls for call in rank) / _all(step)
            for step, calls in zip(steps, of, strict=True)
        ]
        kinds.append(
            Kind(
                name,
                median(len(rank) for step in of for rank in step),
                median(sizes),
                max(sizes),
                _middle(shares) if returned else None,
            )
        )
    return tuple(sorted(kinds, key=lambda kind: (-(kind.share or 0), kind.kind)))


def _length(step: StepTimes) -> int:
    return step.ended - step.began


def _all(ranks: Sequence[StepTimes]) -> int:
    """Return the time of a step, summed over ranks."""
    return sum(map(_length, ranks)) or 1


def _waits(call: CollectiveTimes) -> tuple[tuple[int, int], ...]:
    """Return the spans in which the caller waited."""
    return (call.begun, call.returned), (call.stalled, call.over)


def _waited(call: CollectiveTimes) -> int:
    return sum(end - start for start, end in _waits(call))


def _overlap(step: Sequence[StepTimes]) -> float | None:
    """Return the share of communication time in which no caller waits.

    Waits are within the time on the way, and do not overlap: one caller waits for one collective at
    a time.
    """
    on_the_way = sum(_union((call.begun, call.over) for call in rank.calls) for rank in step)
    waited = sum(_waited(call) for rank in step for call in rank.calls)
    return 1 - waited / on_the_way if on_the_way else None


def _union(spans: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of the spans."""
    covered, reached = 0, 0
    for start, end in sorted(spans):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _idle(step: Sequence[StepTimes]) -> list[float] | None:
    """Return the idle time of each rank, or None where they call different collectives."""
    of = [[call for call in rank.calls if call.kind not in MESSAGES] for rank in step]
    if len({tuple((c.kind, c.bytes, c.ranks, c.root) for c in calls) for calls in of}) > 1:
        return None
    idle = [0] * len(step)
    for calls in zip(*of, strict=True):
        first = calls[0]
        if first.ranks != len(step):
            continue  # of a part of the ranks, and Timed does not say of which
        if first.kind in NEEDS_ALL:
            there = max(call.begun for call in calls)
        elif first.kind in NEEDS_ROOT and 0 <= first.root < len(step):
            there = calls[first.root].begun
        else:
            continue
        for rank, call in enumerate(calls):
            idle[rank] += sum(max(0, min(end, there) - start) for start, end in _waits(call))
    return [one / (_length(rank) or 1) for one, rank in zip(idle, step, strict=True)]


def _update(step: Sequence[StepTimes]) -> float | None:
    if not all(rank.reduced for rank in step):
        return None
    return sum(rank.ended - rank.reduced for rank in step) / _all(step)


def _most(sizes: Iterable[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)


def _middle(shares: Iterable[float]) -> float:
    return rounded(median(shares))


def rounded(value: float) -> float:
    """Round a figure to DIGITS digits."""
    return float(f"{value:.{DIGITS}g}")
