"""From the times of ranks to figures, exactly, with times made by hand."""

from __future__ import annotations

import pytest
from hand_made_times import call, rank, step
from msgspec.structs import replace

from zerocheck.case.schema import Block, Case, Data, Model, Training, UserModel, UserParameter
from zerocheck.protocol.measurements import Timed
from zerocheck.timing.analysis import alone, pace_of
from zerocheck.timing.pace import Pace

CASE = Case(
    mesh=(2,), data=Data(batch=2, length=3), training=Training(microbatches=2), model=Model()
)


def of(*ranks: Timed, case: Case = CASE) -> Pace:
    pace = pace_of(case, ranks)
    assert pace is not None
    return pace


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
    pace = of(rank(early), rank(late))
    # (10 + 200) + (10 + 40) of 2,000; (10 + 20) of 2,000.
    assert [(k.kind, k.calls, k.bytes, k.share) for k in pace.kinds] == [
        ("all_gather", 1, 800, 0.13),
        ("reduce_scatter", 1, 400, 0.015),
    ]
    assert pace.waiting == pytest.approx(0.145) and pace.calls == 2
    assert (pace.forward, pace.update) == (0.4, 0.15)
    # On the way: 300 + 200 and 50 + 200; waited for: 220 and 70.
    assert pace.overlap == pytest.approx(1 - 290 / 750, abs=1e-4)
    assert pace.tokens == 2 * 3 * 2 * 2 and pace.seconds == 1e-6 and pace.steps == 1


def test_collectives_that_are_on_their_way_together_count_once() -> None:
    both = (call("all_reduce", 100, 110, 300), call("all_reduce", 200, 210, 400, stalled=350))
    assert of(rank(step(*both))).overlap == pytest.approx(1 - 70 / 300, abs=1e-4)


def test_idle_is_what_passes_before_the_last_rank_comes() -> None:
    waits = step(call("all_reduce", 100, 110, 800, stalled=110))
    comes = step(call("all_reduce", 600, 610, 800, stalled=610))
    assert of(rank(waits), rank(comes)).idle == (0.5, 0.0)
    # The caller computed from 110 to 500, so that time is not idle.
    computes = step(call("all_reduce", 100, 110, 800, stalled=500))
    assert of(rank(computes), rank(comes)).idle == (0.11, 0.0)


def test_a_broadcast_waits_for_its_root_alone() -> None:
    def of_root(root: int) -> tuple[float, ...]:
        first = step(call("broadcast", 100, 110, 800, stalled=110, root=root))
        second = step(call("broadcast", 600, 610, 800, stalled=610, root=root))
        return of(rank(first), rank(second)).idle

    assert of_root(1) == (0.5, 0.0)
    assert of_root(0) == (0.0, 0.0)


def test_where_idle_time_is_not_known_none_is_told() -> None:
    one = step(call("all_reduce", 100, 110, 800))
    assert of(rank(one), rank(one, clock="another")).idle == ()
    assert of(rank(one, clock=""), rank(one, clock="")).idle == ()
    assert of(rank(one), rank(step(call("all_gather", 1, 2, 3)))).idle == ()
    part = step(call("all_reduce", 100, 110, 800, stalled=110, ranks=1))
    assert of(rank(part), rank(step(call("all_reduce", 600, 610, 800, ranks=1)))).idle == (0, 0)


def test_on_an_accelerator_collectives_are_counted_and_not_timed() -> None:
    one = step(call("all_reduce", 100, 0, 0))
    pace = of(rank(one, allocated=5, reserved=9), rank(one, allocated=7, reserved=8))
    assert pace.kinds[0].calls == 1 and pace.kinds[0].share is None
    assert pace.waiting is None and pace.overlap is None and pace.idle == ()
    assert (pace.allocated, pace.reserved) == (7, 9)


def test_figures_are_medians_over_steps_and_the_slowest_rank_counts() -> None:
    ends = (1000, 9000, 2000)
    pace = of(rank(*(step(ended=end) for end in ends)), rank(*(step(ended=1500) for _ in ends)))
    assert pace.seconds == 2e-6 and pace.steps == 3
    assert pace.kinds == () and pace.overlap is None and pace.update is None
    assert pace_of(CASE, [rank(), rank()]) is None


def test_tokens_of_the_users_own_batches_are_not_known() -> None:
    user = UserModel(factory="a:b", parameters=(UserParameter(name="w", shape=(2,)),))
    assert of(rank(step()), case=replace(CASE, model=Model(user=user))).tokens == 0


def test_tensors_that_are_reduced_alone_are_counted_by_their_bytes() -> None:
    model = Model(width=4, inputs=3, outputs=2, blocks=(Block(kind="rms_norm"),))
    case = Case(mesh=(3,), model=model)
    # stem 12 and 4, norm 4, head 8 and 2 elements
    calls = [call("all_reduce", 0, 0, 0, size=4 * n) for n in (12, 4, 4, 8)]
    assert alone(case, calls) == 4
    assert alone(case, [*calls, call("all_reduce", 0, 0, 0, size=8)]) == 5
    assert alone(case, [call("reduce_scatter", 0, 0, 0, size=4 * 3)]) == 1  # 2, padded for 3 ranks
    assert alone(case, [call("all_reduce", 0, 0, 0, size=4 * 30)]) == 0
