"""Ranks that lack something of the machine run again with no others; then it is the machine's."""

from __future__ import annotations

import pytest
from ranks_asking import Ask, answers

from zerocheck.errors import UsageError
from zerocheck.ranks import Pool


@pytest.fixture(autouse=True)
def _not_lean(shared_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pool, "_lean", False)


def test_idle_ranks_make_way_for_memory(
    ask: Ask, shared_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(2, "pid")
    ask(3, "pid")

    def available() -> int:
        return (400 << 20) - (60 << 20) * sum(map(len, shared_pool.rank_pids.values()))

    monkeypatch.setattr("zerocheck.ranks.limits.available_bytes", available)
    assert len(answers(ask(4, "pid"))) == 4
    assert 2 not in shared_pool.rank_pids


def test_what_was_lacking_beside_others_is_no_crash(ask: Ask, shared_pool: Pool) -> None:
    ask(2, "pid")
    ask(3, "pid")
    assert ask(3, "lack").outcome == "finished"
    assert list(shared_pool.rank_pids) == [3]


def test_what_is_lacking_still(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the machine has ample room the code used it up."""
    assert ask(2, "lack always").outcome == "crashed"
    monkeypatch.setattr("zerocheck.ranks.pool.is_ample", lambda words, ranks: False)
    with pytest.raises(UsageError, match="no further process or thread may be started"):
        ask(2, "lack always")


def test_a_death_that_a_control_group_counts(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is killed for memory says nothing."""
    counts = iter(range(100))
    monkeypatch.setattr("zerocheck.ranks.in_flight_job.denials", lambda what: next(counts))
    monkeypatch.setattr("zerocheck.ranks.pool.is_ample", lambda words, ranks: False)
    with pytest.raises(UsageError, match="not enough memory"):
        ask(2, "kill_one 9")
