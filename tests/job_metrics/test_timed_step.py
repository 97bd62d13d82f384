"""From the times of ranks to figures, exactly, with times made by hand."""

from __future__ import annotations

import pytest

from zerocheck.job_metrics.records import CollectiveTimes, RankFigures, StepTimes, TimedStep
from zerocheck.job_metrics.timed_step import timed_step


def call(
    kind: str,
    begun: int,
    returned: int,
    over: int,
    *,
    stalled: int | None = None,
    size: int = 400,
    ranks: int = 2,
    root: int = -1,
) -> CollectiveTimes:
    """A collective that nobody waits for after it returned, unless `stalled` is passed."""
    return CollectiveTimes(
        kind, size, ranks, root, begun, returned, over if stalled is None else stalled, over
    )


def step(
    *calls: CollectiveTimes,
    ended: int = 1000,
    forward: int = 0,
    reduced: int = 0,
    clock: str = "a clock",
) -> StepTimes:
    """One step of one rank, 1,000 ns long unless `ended` is passed."""
    return StepTimes(0, ended, forward, reduced, calls=calls, clock=clock)


def of(*ranks: StepTimes) -> TimedStep:
    return timed_step(7, [RankFigures(timed=one) for one in ranks], None, None)


def test_shares_are_of_the_time_of_all_ranks() -> None:
    early = step(
        call("all_gather", 100, 110, 400, stalled=200, size=800),
        call("reduce_scatter", 500, 510, 700),
        forward=300,
        reduced=900,
    )
    late = step(
        call("all_gather", 350, 360, 400, stalled=360, size=800),
        call("reduce_scatter", 500, 520, 700),
        forward=500,
        reduced=800,
    )
    figures = of(early, late)
    # (10 + 200) + (10 + 40) of 2,000; (10 + 20) of 2,000.
    assert [(one.kind, one.calls, one.bytes, one.waited) for one in figures.collectives] == [
        ("all_gather", 1, 800, 0.13),
        ("reduce_scatter", 1, 400, 0.015),
    ]
    assert figures.waited == pytest.approx(0.145)
    assert (figures.forward, figures.update) == (0.4, 0.15)
    # On the way: 300 + 200 and 50 + 200; waited for: 220 and 70.
    assert figures.overlap == pytest.approx(1 - 290 / 750, abs=1e-4)
    assert figures.seconds == 1e-6 and figures.step == 7


def test_collectives_that_are_on_their_way_together_count_once() -> None:
    both = (call("all_reduce", 100, 110, 300), call("all_reduce", 200, 210, 400, stalled=350))
    assert of(step(*both)).overlap == pytest.approx(1 - 70 / 300, abs=1e-4)


def test_idle_is_what_passes_before_the_last_rank_comes() -> None:
    waits = step(call("all_reduce", 100, 110, 800, stalled=110))
    comes = step(call("all_reduce", 600, 610, 800, stalled=610))
    figures = of(waits, comes)
    assert figures.idle == (0.5, 0.0)
    # Waited: 700 and 200 of 2,000, less the mean idle share.
    assert figures.waited == 0.45 and figures.link == pytest.approx(0.2)
    # The caller computed from 110 to 500, so that time is not idle.
    computes = step(call("all_reduce", 100, 110, 800, stalled=500))
    assert of(computes, comes).idle == (0.11, 0.0)


def test_a_broadcast_waits_for_its_root_alone() -> None:
    def of_root(root: int) -> tuple[float, ...]:
        first = step(call("broadcast", 100, 110, 800, stalled=110, root=root))
        second = step(call("broadcast", 600, 610, 800, stalled=610, root=root))
        return of(first, second).idle

    assert of_root(1) == (0.5, 0.0)
    assert of_root(0) == (0.0, 0.0)


def test_unknown_idle_time_is_left_out() -> None:
    calls = call("all_reduce", 100, 110, 800)
    assert of(step(calls), step(calls, clock="another")).idle == ()
    assert of(step(calls, clock=""), step(calls, clock="")).idle == ()
    assert of(step(calls), step(call("all_gather", 1, 2, 3))).idle == ()
    part = step(call("all_reduce", 100, 110, 800, stalled=110, ranks=1))
    assert of(part, step(call("all_reduce", 600, 610, 800, ranks=1))).idle == (0, 0)


def test_on_an_accelerator_collectives_are_counted_and_not_timed() -> None:
    figures = of(*[step(call("all_reduce", 100, 0, 0))] * 2)
    assert figures.collectives[0].calls == 1 and figures.collectives[0].waited is None
    assert figures.waited is None and figures.link is None
    assert figures.overlap is None and figures.idle == ()


def test_the_slowest_rank_counts() -> None:
    figures = of(step(ended=2000), step(ended=1500))
    assert figures.seconds == 2e-6
    assert figures.collectives == () and figures.overlap is None and figures.update is None


def test_tokens_of_ranks_with_the_same_samples_count_once() -> None:
    ranks = [RankFigures(timed=step(), tokens=12, microbatches=2)] * 4
    assert timed_step(0, ranks, None, 0.5).tokens_per_second == 96
    figures = timed_step(0, ranks, 2, None)
    assert (figures.tokens, figures.tokens_per_second, figures.microbatches) == (24, None, 2)
