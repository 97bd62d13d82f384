"""Which cases are timed, and how real ones ran."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from zerocheck.case.schema import Block, Case, Data, Disturbance, Model, Sharding, TrainingSegment
from zerocheck.catalogue import BUILT_IN
from zerocheck.drive.timing import COUNTED
from zerocheck.protocol.jobs import TimeSteps
from zerocheck.protocol.replies import TimeReply
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.rank_replies import received
from zerocheck.run.execute.segments import Segments
from zerocheck.run.execute.trial import Trial
from zerocheck.run.plan.plan import EVERY, PlannedCase, TimingChoice
from zerocheck.timing.analysis import pace_of
from zerocheck.timing.pace import Pace, patterns

BLOCKS = (Block(kind="mlp", hidden=24), Block(kind="layer_norm"))
CASE = Case(mesh=(2,), model=Model(blocks=BLOCKS, width=16), sharding=Sharding(wrap="block"))
SUBJECTS = str(Path(__file__).parents[1] / "slow_subjects.py")


def timed(pool: Pool, name: str, case: Case = CASE) -> Pace:
    outcome = Trial(pool, name, case, timed=True).outcome()
    assert outcome.pace is not None and not outcome.pace.broken, outcome
    return outcome.pace


@pytest.mark.every(2)
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_ones_have_figures_and_show_no_pattern(pool: Pool, name: str) -> None:
    pace = timed(pool, name)
    assert pace.steps == COUNTED and pace.seconds > 0 and 0 < pace.forward < 1
    assert pace.waiting is not None and 0 < pace.waiting < 1
    assert pace.overlap is not None and 0 <= pace.overlap < 1
    assert len(pace.idle) == 2 and all(0 <= idle < 1 for idle in pace.idle)
    assert not patterns(CASE, pace)
    small = replace(CASE, sharding=Sharding(wrap="layer", bucket=64))
    assert not patterns(small, timed(pool, name, small))


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("zerocheck.faults.communication:OneCollectivePerParameter", "too many small collectives"),
        (f"{SUBJECTS}:OneBucket", "a bucket that spikes memory"),
        (f"{SUBJECTS}:OneUnit", "a wrapping that gathers too much"),
    ],
)
def test_what_a_sharder_does_wrong_is_said(pool: Pool, name: str, begins: str) -> None:
    case = CASE
    if "Bucket" in name:
        case = replace(CASE, sharding=Sharding(bucket=64))
    (message,) = patterns(case, timed(pool, name, case))
    assert message.startswith(begins)


def test_a_slow_rank_leaves_the_others_idle(pool: Pool) -> None:
    job = Segments(f"{SUBJECTS}:SlowRank", CASE).timing()
    result = pool.wait(pool.submit(2, msgspec.msgpack.encode(job)))
    replies = received(result, TimeReply)
    result.release()
    pace = pace_of(CASE, [reply.timed for reply in replies])
    # It sleeps once the other one has come, and nothing else takes time.
    assert pace is not None and pace.idle[0] > 0.5 > pace.idle[1]
    assert pace.overlap is not None and pace.overlap < 0.5


def test_a_run_that_breaks_while_it_is_timed_is_no_verdict(pool: Pool) -> None:
    outcome = Trial(pool, f"{SUBJECTS}:BreaksLater", CASE, timed=True).outcome()
    assert outcome.status == "holds"
    assert outcome.pace is not None and "it was never to come so far" in outcome.pace.broken


def test_saves_and_loads_have_their_times(pool: Pool) -> None:
    case = replace(CASE, resume=(TrainingSegment(mesh=(2,)),))
    outcome = Trial(pool, "zero2", case).outcome()
    assert outcome.status == "holds" and outcome.pace is None
    assert len(outcome.save_seconds) == len(outcome.load_seconds) == 1
    assert min(*outcome.save_seconds, *outcome.load_seconds) > 0
    killed = replace(CASE, resume=(TrainingSegment(mesh=(2,), damage="remove"),))
    assert Trial(pool, "zero2", killed).outcome().load_seconds == ()


def test_nothing_is_delayed_or_saved_where_steps_are_timed() -> None:
    case = replace(CASE, disturbance=Disturbance(delay=2.0))
    job = Segments("zero2", case, trace=True).timing()
    assert job == TimeSteps("zero2", CASE)


def test_few_cases_are_timed_and_world_sizes_take_turns() -> None:
    cases = TimingChoice((1, 2, 3))
    chosen = []
    for number in range(4 * EVERY):
        case = Case(mesh=(1 + number % 3,), seed=number, data=Data(batch=1))
        if cases.next(PlannedCase("zero2", case)):
            chosen.append(case)
    assert sorted(case.world_size for case in chosen) == [2, 2, 3, 3]
    assert cases.next(PlannedCase("ddp", CASE)) and not cases.next(PlannedCase("ddp", CASE))
    cases.failed(PlannedCase("ddp", CASE))
    assert cases.next(PlannedCase("ddp", replace(CASE, seed=1)))
    assert TimingChoice((1,)).next(PlannedCase("ddp", replace(CASE, mesh=(1,))))
