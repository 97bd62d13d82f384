"""Replies of ranks are decoded for what they are, and a refusal ends nothing but its case."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from zerocheck.case.schema import Case, Training, TrainingSegment
from zerocheck.errors import HarnessError, Unsupported
from zerocheck.protocol.measurements import Measured, Timed
from zerocheck.protocol.observations import RankObservation
from zerocheck.protocol.replies import CaseUnsupported, MemoryReply, Reply, TimeReply
from zerocheck.ranks.result import JobResult, RankOutcome
from zerocheck.run.execute.outcome import Results, judged
from zerocheck.run.execute.rank_replies import complete, read_observations, received
from zerocheck.run.execute.trial import Trial

CASE = Case(mesh=(2,))
MEMORY = MemoryReply(measured=Measured())


def result(*replies: Reply | None) -> JobResult:
    """A finished job with these replies; None for a rank without one."""
    payloads = tuple(None if one is None else msgspec.msgpack.encode(one) for one in replies)
    ranks = tuple(RankOutcome(rank, "finished") for rank in range(len(replies)))
    return JobResult("finished", payloads, tuple(None for _ in replies), ranks, 0.0)


def test_every_kind_comes_back() -> None:
    for reply in (MEMORY, TimeReply(Timed()), RankObservation()):
        assert received(result(reply, reply), type(reply)) == [reply, reply]


def test_a_refusal_of_any_rank_is_its_reason() -> None:
    with pytest.raises(Unsupported, match="not on rank 1"):
        read_observations(result(RankObservation(), CaseUnsupported("not on rank 1")))


def test_another_kind_is_an_error_of_ours() -> None:
    with pytest.raises(HarnessError, match="replied TimeReply, not RankObservation"):
        read_observations(result(TimeReply(Timed())))


def test_a_rank_without_a_reply() -> None:
    assert complete(result(MEMORY, MEMORY)) and not complete(result(MEMORY, None))


def test_a_timed_run_that_refuses_breaks_the_timing_alone() -> None:
    refused = CaseUnsupported("not twice")
    outcome = judged(CASE, Results((), measured=result(MEMORY, MEMORY), timed=result(refused)))
    assert outcome.status == "holds"
    assert outcome.pace is not None and outcome.pace.broken == "not twice"


@pytest.mark.parametrize(
    ("how", "status"), [("hung", "unsupported"), ("crashed", "crashed"), ("alone", "hung")]
)
def test_a_refusal_that_others_wait_for_is_one(how: str, status: str) -> None:
    """A rank that dies beside it is not explained by it, nor is a rank that waits by itself."""
    first = MEMORY if how == "alone" else CaseUnsupported("not on rank 0")
    broken = result(first, None)
    broken = dataclasses.replace(broken, outcome="crashed" if how == "crashed" else "hung")
    if how == "crashed":
        died = RankOutcome(rank=1, state="killed", signal_name="SIGKILL")
        broken = dataclasses.replace(broken, rank_outcomes=(died, died), first_failed=1)
    outcome = judged(CASE, Results((broken,)))
    assert outcome.status == status
    assert (outcome.reason == "not on rank 0") is (how == "hung")


class OneAnswer:
    """Ranks that give one result for every job."""

    device = "cpu"

    def __init__(self, answer: JobResult) -> None:
        self.answer = answer
        self.jobs = 0

    def submit(self, world_size: int, payload: bytes, **_: object) -> None:
        self.jobs += 1

    def wait(self, pending: object) -> JobResult:
        return self.answer


def test_a_victim_that_refuses_is_not_killed() -> None:
    """Rank 0 may have been observed: then the job is judged, as unsupported."""
    case = Case(
        mesh=(2,),
        seed=1,
        training=Training(steps=1),
        resume=(TrainingSegment(mesh=(2,), killed=0.5),),
    )
    ranks = OneAnswer(result(RankObservation(), CaseUnsupported("not on rank 1")))
    trial = Trial(ranks, "zero2", case)  # type: ignore[arg-type]
    outcome = trial.judged(trial.result())
    assert (outcome.status, outcome.reason) == ("unsupported", "not on rank 1")
