"""Searches side by side: each gets its own answers, and nothing is run twice."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import msgspec
import pytest

from zerocheck.case.schema import Case
from zerocheck.kill_matrix.scheduler import TrialRequest, run_searches
from zerocheck.protocol.jobs import Job
from zerocheck.ranks.result import JobResult
from zerocheck.run.execute.outcome import Results


@dataclass
class Pending:
    """A job that comes back when it is waited for, or before."""

    job: Job
    done: bool = False


@dataclass
class Ranks:
    """Counts what is under way. early: implementations whose jobs come back at once."""

    early: tuple[str, ...] = ()
    submitted: list[Job] = field(default_factory=list)
    waited: list[str] = field(default_factory=list)
    most: int = 0

    def submit(self, world_size: int, payload: bytes, **_: object) -> Pending:
        job = msgspec.msgpack.decode(payload, type=Job)
        self.submitted.append(job)
        self.most = max(self.most, len(self.submitted) - len(self.waited))
        return Pending(job, job.implementation in self.early)

    def wait(self, pending: Pending) -> JobResult:
        self.waited.append(pending.job.implementation)
        return JobResult("finished", (), (), (), 0.0, reason=pending.job.implementation)

    def close(self) -> None:
        pass


def answer(ask: TrialRequest, results: Results) -> str:
    (result,) = results.segments
    assert result.reason == ask.implementation
    return f"{ask.implementation} on {ask.case.seed}"


Search = Generator[tuple[TrialRequest, ...], tuple[str, ...], None]


def search(name: str, lines: list[str], cases: int = 3) -> Search:
    for seed in range(cases):
        lines.extend((yield (TrialRequest(name, Case(seed=seed)),)))


def test_each_search_gets_its_own_answers() -> None:
    ranks = Ranks()
    lines: dict[str, list[str]] = {name: [] for name in "abcde"}
    run_searches(ranks, (search(name, into) for name, into in lines.items()), answer, ahead=3)
    assert lines == {name: [f"{name} on {seed}" for seed in range(3)] for name in lines}
    assert len(ranks.submitted) == len(ranks.waited) == 15
    assert ranks.most == 3


def test_what_several_ask_for_is_run_once() -> None:
    ranks = Ranks()
    lines: list[list[str]] = [[] for _ in range(6)]
    run_searches(ranks, (search("same", into) for into in lines), answer, ahead=2)
    assert all(into == [f"same on {seed}" for seed in range(3)] for into in lines)
    assert len(ranks.submitted) == 3


def test_several_answers_come_together_in_their_order() -> None:
    ranks = Ranks(early=("b",))
    lines: list[tuple[str, ...]] = []

    def pairs() -> Search:
        for names in (("a", "b"), ("b", "a", "b"), ("c", "a")):
            lines.append((yield tuple(TrialRequest(name, Case()) for name in names)))

    run_searches(ranks, [pairs(), pairs()], answer)
    message = [("a on 0", "b on 0"), ("b on 0", "a on 0", "b on 0"), ("c on 0", "a on 0")]
    assert sorted(lines) == sorted(message * 2)
    assert ranks.waited == ["b", "a", "c"]


def test_what_has_come_back_is_not_kept_waiting() -> None:
    ranks = Ranks(early=("quick",))
    run_searches(ranks, [search("slow", [], 1), search("quick", [], 2)], answer)
    assert ranks.waited == ["quick", "quick", "slow"]


def test_an_error_ends_it() -> None:
    def fails() -> Search:
        yield (TrialRequest("a", Case()),)
        raise ArithmeticError("enough")

    with pytest.raises(ArithmeticError, match="enough"):
        run_searches(Ranks(), [fails()], answer)
