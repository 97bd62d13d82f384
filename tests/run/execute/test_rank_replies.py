"""Replies of ranks are decoded for what they are, and a refusal ends nothing but its case."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from zerocheck.case.schema import Case, Training, TrainingSegment
from zerocheck.errors import HarnessError, Unsupported
from zerocheck.protocol.measurements import Measured
from zerocheck.protocol.observations import RankObservation
from zerocheck.protocol.replies import CaseUnsupported, MemoryReply, Reply, StepsTaken
from zerocheck.ranks.progress import RECORD_BYTES, Progress, position
from zerocheck.ranks.result import JobResult, RankOutcome, State
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
    for reply in (MEMORY, StepsTaken(), RankObservation()):
        assert received(result(reply, reply), type(reply)) == [reply, reply]


def test_a_refusal_of_any_rank_is_its_reason() -> None:
    with pytest.raises(Unsupported, match="not on rank 1"):
        read_observations(result(RankObservation(), CaseUnsupported("not on rank 1")))


def test_another_kind_is_an_error_of_ours() -> None:
    with pytest.raises(HarnessError, match="replied StepsTaken, not RankObservation"):
        read_observations(result(StepsTaken()))


def test_a_rank_without_a_reply() -> None:
    assert complete(result(MEMORY, MEMORY)) and not complete(result(MEMORY, None))


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


def traced(*calls: list[str], outcome: str = "crashed") -> JobResult:
    """Ranks that called these collectives; the first was lost."""
    board = bytearray(len(calls) * RECORD_BYTES)
    ranks = []
    for rank, names in enumerate(calls):
        progress = Progress(board, rank)
        for number, name in enumerate(names, 1):
            progress.collective(name, number)
        at = position(bytes(board[rank * RECORD_BYTES : (rank + 1) * RECORD_BYTES]))
        state: State = "waiting" if rank or outcome == "hung" else "killed"
        ranks.append(
            RankOutcome(
                rank,
                state,
                signal_name="SIGABRT",
                collective=at.collective,
                collective_sequence=at.collective_sequence,
                recent=at.recent,
            )
        )
    first = 0 if outcome == "crashed" else None
    return dataclasses.replace(
        result(*[None] * len(calls)),
        outcome=outcome,
        rank_outcomes=tuple(ranks),
        first_failed=first,
    )


@pytest.mark.parametrize(
    ("others", "named"),
    [
        (["a(1)", "b(2)"], False),
        (["a(1)", "b(2)", "c(3)", "d(4)"], False),  # it is ahead
        (["a(1)", "b(4)"], True),
        (["a(1)", "b(4)", "c(3)"], True),  # it went on before the first rank failed
        (["a(1)", "b(4)", *(["c(3)"] * 20)], True),
        (["a(2)", "b(2)"], False),  # they came through
        (["a(2)"], True),
        (["a(1)"], False),
        ([], False),
    ],
)
def test_the_cause_of_a_crash_in_collectives(others: list[str], named: bool) -> None:
    """Calls are matched by their numbers; a rank that is ahead is asked what it had called."""
    outcome = judged(CASE, Results((traced(["a(1)", "b(2)"], others),)))
    assert outcome.status == "crashed"
    assert outcome.causes == (("different collectives",) if named else ())


def test_an_error_of_the_script_is_no_other_collective() -> None:
    """Ranks that raise it may have called collectives of other sizes."""
    crashed = traced(["a(1)"], ["a(2)"])
    for told, named in (("gloo/transport/tcp/pair.cc", True), ("x only accepts y", False)):
        raised = [
            dataclasses.replace(one, state="raised", type_name="RuntimeError", text=told)
            for one in crashed.rank_outcomes
        ]
        outcome = judged(CASE, Results((dataclasses.replace(crashed, rank_outcomes=(*raised,)),)))
        assert outcome.causes == (("different collectives",) if named else ())
        assert outcome.title == f"the ranks crashed: RuntimeError: {told}"


def test_the_cause_of_a_hang_in_collectives() -> None:
    """All wait: where they wait at other numbers, one of them has left out a call."""
    for others, named in ((["a(1)", "b(2)"], False), (["a(1)"], True), (["a(1)", "c(2)"], True)):
        outcome = judged(CASE, Results((traced(["a(1)", "b(2)"], others, outcome="hung"),)))
        assert outcome.status == "hung"
        assert bool(outcome.causes) is named, others


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
