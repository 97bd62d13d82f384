"""Ranks die, raise, hang: the result says where each stood, and the next job works."""

from __future__ import annotations

import os
import re
import time

import psutil
import pytest
from ranks_asking import Ask, answers

from zerocheck.ranks import ArenaView, Pool, Slot


def works_again(ask: Ask) -> bool:
    return answers(ask(3, "reduce")) == [3.0] * 3


@pytest.mark.parametrize(
    ("what", "signal_name", "exit_code"),
    [
        ("kill_one", "SIGKILL", None),
        ("abort_one", "SIGABRT", None),
        ("segfault_one", "SIGSEGV", None),
        ("leave_one", "", 5),
    ],
)
def test_death(ask: Ask, what: str, signal_name: str, exit_code: int | None) -> None:
    result = ask(3, what)
    dead = result.rank_outcomes[1]
    assert result.outcome == "crashed"
    assert result.first_failed == 1
    assert (dead.state, dead.signal_name, dead.exit_code) == ("killed", signal_name, exit_code)
    assert result.payloads == (None, None, None)
    # gloo tells the others that their peer is gone; one may wait for the other, though.
    others = [result.rank_outcomes[0], result.rank_outcomes[2]]
    assert all(outcome.echo or outcome.state == "waiting" for outcome in others)
    assert any(outcome.echo for outcome in others)
    assert all(outcome.collective == "all_reduce" for outcome in others)
    if what == "kill_one":
        assert dead.where == "about to die"
    if signal_name in ("SIGABRT", "SIGSEGV"):
        assert what in dead.output  # the stack that faulthandler wrote
    assert "rank 1 failed first" in result.summary()
    assert works_again(ask)


@pytest.mark.parametrize(
    ("what", "name", "text"),
    [("exit_one", "SystemExit", "3"), ("raise_one", "ranks_targets.OwnError", "only here")],
)
def test_one_raises_while_the_others_wait(ask: Ask, what: str, name: str, text: str) -> None:
    result = ask(3, what)
    assert result.outcome == "crashed"
    assert result.first_failed == 1
    assert (result.rank_outcomes[1].type_name, result.rank_outcomes[1].text) == (name, text)
    assert what in result.rank_outcomes[1].traceback
    assert re.search(
        rf", in {what} \(.*ranks_targets\.py:\d+\)", result.rank_outcomes[1].headline()
    )
    assert "worker.py" not in result.rank_outcomes[1].traceback
    for rank in (0, 2):
        outcome = result.rank_outcomes[rank]
        assert (outcome.state, outcome.where, outcome.collective) == (
            "waiting",
            "the sum",
            "all_reduce",
        )
        assert "in all_reduce" in outcome.stack
        assert "zygote.py" not in outcome.stack
    if what == "raise_one":
        assert result.rank_outcomes[1].output == "a word before the end"
    assert works_again(ask)


def test_what_was_put_before_an_exception_can_be_read(shared_pool: Pool) -> None:
    result = shared_pool.wait(shared_pool.submit(3, b"raise_one"))
    arena = result.arenas[1]
    assert isinstance(arena, ArenaView)
    assert arena.tensor(Slot(0, 3, "float32")).tolist() == [
        1.0,
        1.0,
        1.0,
    ]  # though the team is dead
    assert result.arenas[0] is None
    result.release()


@pytest.mark.parametrize("what", ["raise_all", "interrupt_all", "bad_text"])
def test_all_raise_alike_and_the_team_is_kept(ask: Ask, what: str) -> None:
    before = answers(ask(3, "pid"))
    result = ask(3, what)
    assert result.outcome == "crashed"
    assert [outcome.state for outcome in result.rank_outcomes] == ["raised"] * 3
    assert answers(ask(3, "pid")) == before


def test_hang(ask: Ask) -> None:
    began = time.monotonic()
    result = ask(3, "skip_one")
    assert time.monotonic() - began < 30  # seen, and not waited for: a collective has minutes
    assert result.outcome == "hung"
    assert result.first_failed is None
    assert [outcome.state for outcome in result.rank_outcomes] == ["waiting", "finished", "waiting"]
    assert "skip_one" in result.rank_outcomes[2].stack
    text = result.summary()
    place = r"in _reduce \(.*ranks_targets\.py:\d+\)"
    message = f"rank 0 waited at step 2, forward, {place}, last collective all_reduce #1"
    assert re.search(message, text)
    assert "stack of ranks 0, 2" in text or text.count("stack of rank") == 2
    assert works_again(ask)


@pytest.mark.parametrize("bad", ["leave_one", "raise_one", "raise_all", "skip_one"])
def test_jobs_sent_ahead_survive_the_end_of_a_team(shared_pool: Pool, bad: str) -> None:
    """They do not start beside the one that fails, and run on the next team."""
    whats = ["reduce", bad, "reduce", "put 8", "reduce"]
    pending = [shared_pool.submit(3, what.encode()) for what in whats]
    results = [shared_pool.wait(one) for one in pending]
    for result in results:
        result.release()
    expected = "hung" if bad == "skip_one" else "crashed"
    assert [r.outcome for r in results] == ["finished", expected, *["finished"] * 3]


def test_a_rank_that_dies_between_jobs_is_nobodys_fault(ask: Ask, shared_pool: Pool) -> None:
    ask(2, "pid")
    psutil.Process(shared_pool.rank_pids[2][1]).kill()
    assert answers(ask(2, "reduce")) == [2.0, 2.0]


def test_children_of_a_rank_end_with_it(ask: Ask) -> None:
    children = answers(ask(2, "fork_child", fresh=True))
    until = time.monotonic() + 3
    while any(map(psutil.pid_exists, children)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(psutil.pid_exists, children))


def test_a_busy_rank_is_not_hung(ask: Ask) -> None:
    assert answers(ask(2, "burn 2.5")) == [2.0, 2.0]  # patience is 1 s


def test_a_rank_that_waits_for_a_busy_child_is_not_hung(ask: Ask) -> None:
    if not os.path.exists("/proc/self/task"):
        pytest.skip("needs /proc")
    assert ask(2, "child_burns 2.5").outcome == "finished"


def test_busy_without_progress_is_hung_at_the_ceiling(
    shared_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that has reached it once would wait for it in each further case, and repetition."""
    monkeypatch.setattr(shared_pool, "_ceiling_s", 3.0)
    took = []
    for code in ("endless", "endless", "another"):
        began = time.monotonic()
        result = shared_pool.wait(shared_pool.submit(2, b"burn 60", code=code))
        took.append(time.monotonic() - began)
        assert result.outcome == "hung"
        assert [outcome.state for outcome in result.rank_outcomes] == ["running", "waiting"]
        assert "burn" in result.rank_outcomes[0].stack
    assert took[1] + 1 < min(took[0], took[2])
