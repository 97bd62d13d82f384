"""Jobs go out, results come back, and processes are kept, replaced and counted."""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
from ranks_asking import TARGET, Ask, answers

from zerocheck.errors import HarnessError, UsageError
from zerocheck.machine.host import available_bytes
from zerocheck.machine.shortage import shortage
from zerocheck.ranks import Pool, Slot
from zerocheck.ranks.context import load_target


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_round_trip(ask: Ask, world_size: int) -> None:
    result = ask(world_size, "echo word")
    assert answers(result) == [[r, world_size, world_size, "word"] for r in range(world_size)]
    assert answers(ask(world_size, "reduce")) == [float(world_size)] * world_size


def test_modules_are_imported_once_for_all_ranks() -> None:
    """One that is missing is the affair of who needs it."""
    with Pool(TARGET, warm=["wave", "no_such_module"]) as pool:
        for name, there in (("wave", True), ("no_such_module", False), ("chunk_of_wave", False)):
            result = pool.wait(pool.submit(2, f"already {name}".encode()))
            result.release()
            assert answers(result) == [there] * 2


def test_each_rank_gets_its_own_payload(shared_pool: Pool) -> None:
    result = shared_pool.wait(shared_pool.submit(3, [f"echo {n}".encode() for n in "abc"]))
    result.release()
    assert [answer[3] for answer in answers(result)] == ["a", "b", "c"]


def test_large_payloads(shared_pool: Pool) -> None:
    word = "x" * 3_000_000
    result = shared_pool.wait(shared_pool.submit(2, f"echo {word}".encode()))
    result.release()
    assert [answer[3] for answer in answers(result)] == [word] * 2


def test_ddp_and_fsdp2_run_a_backward(ask: Ask) -> None:
    first, second = answers(ask(2, "backward"))
    assert first == second


def test_what_a_rank_finds(ask: Ask) -> None:
    found = answers(ask(2, "environment"))[0]
    assert found["threads"] == 1
    assert found["group"] == "gloo"
    assert not found["cuda"]
    assert found["directory"] == os.getcwd()
    assert os.path.dirname(__file__) in found["path"]
    # Nothing of other ranks, the zygote or the parent.
    assert not any(f"{kind}-1" in name for name in found["files"] for kind in ("output", "stack"))
    assert sum(name.startswith("socket:") for name in found["files"]) <= 4


def test_arenas_of_all_ranks(shared_pool: Pool) -> None:
    for count in (10, 1000, 1_000_000):  # the last one grows the arenas
        result = shared_pool.wait(shared_pool.submit(3, f"put {count}".encode()))
        for rank, (answer, arena) in enumerate(zip(answers(result), result.arenas, strict=True)):
            assert arena is not None
            expected = torch.arange(count, dtype=torch.float32) + 1000 * rank
            assert torch.equal(arena.tensor(Slot(*answer)), expected)
        result.release()


def test_a_result_stays_readable_while_later_jobs_run(shared_pool: Pool) -> None:
    """Sent ahead, judged late, and the arenas are used again only after release."""
    pending = [shared_pool.submit(2, f"put {count}".encode()) for count in (11, 12, 13)]
    results = [shared_pool.wait(one) for one in pending]
    for count, result in zip((11, 12, 13), results, strict=True):
        arena = result.arenas[1]
        assert arena is not None
        slot = Slot(*json.loads(result.payloads[1] or b""))
        assert torch.equal(arena.tensor(slot), torch.arange(float(count)) + 1000)
    for result in results:
        result.release()
        result.release()


def test_results_may_be_awaited_in_any_order(shared_pool: Pool) -> None:
    pending = [shared_pool.submit(w, f"echo {w}".encode()) for w in (2, 3, 2, 3)]
    for one in reversed(pending):
        assert shared_pool.wait(one).outcome == "finished"
        shared_pool.wait(one).release()


def test_fresh_is_on_new_processes(ask: Ask) -> None:
    old = answers(ask(2, "pid"))
    assert answers(ask(2, "pid")) == old
    fresh = answers(ask(2, "pid", fresh=True))
    assert not set(fresh) & set(old)
    assert not any(psutil.pid_exists(pid) for pid in fresh)
    assert answers(ask(2, "pid")) == old


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", True, None, 251, 10**9])
def test_impossible_world_sizes(shared_pool: Pool, wrong: object) -> None:
    with pytest.raises(UsageError, match="world size"):
        shared_pool.submit(wrong, b"")  # type: ignore[arg-type]


def test_memory_is_counted(shared_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (available_bytes() or 0) > 1 << 20
    monkeypatch.setattr("zerocheck.ranks.limits.available_bytes", lambda: 200 << 20)
    with pytest.raises(UsageError, match=r"needs about 420 MiB \(60 MiB a rank\), but 200 MiB"):
        shared_pool.submit(7, b"")


def test_as_many_payloads_as_ranks(shared_pool: Pool) -> None:
    with pytest.raises(UsageError, match="2 payloads for a world size of 3"):
        shared_pool.submit(3, [b"", b""])


def test_nothing_grows_over_200_jobs(ask: Ask, shared_pool: Pool) -> None:
    def count() -> tuple[object, ...]:
        gc.collect()  # mappings of teams that are gone
        processes = [psutil.Process(), psutil.Process(shared_pool.zygote_pid)]
        processes += [psutil.Process(pid) for pid in shared_pool.rank_pids[2]]
        return len(shared_pool.rank_pids), [(p.num_fds(), p.num_threads()) for p in processes]

    def use() -> None:
        ask(2, "put 1000")
        ask(2, "reduce")

    use()
    before = count()
    for _ in range(100):
        use()
    assert count() == before


def test_a_team_that_breaks_leaves_nothing(ask: Ask, shared_pool: Pool) -> None:
    ask(2, "leave_one")
    before = psutil.Process().num_fds(), psutil.Process(shared_pool.zygote_pid).num_fds()
    for _ in range(3):
        ask(2, "leave_one")
    assert (psutil.Process().num_fds(), psutil.Process(shared_pool.zygote_pid).num_fds()) == before
    assert 2 not in shared_pool.rank_pids


def test_idle_teams_are_closed_and_the_pool_cleans_up() -> None:
    with Pool(TARGET, max_idle_ranks=5) as pool:
        assert pool.wait_until_ready() > 0
        for world_size in (1, 2, 3):
            pool.wait(pool.submit(world_size, b""))
        assert sorted(pool.rank_pids) == [2, 3]
        pids = [pool.zygote_pid, *pool.rank_pids[3]]
        lost = pool.submit(3, b"sleep 60")
        directories = pool._scratch.directories
        assert all(os.path.isdir(directory) for directory in directories)
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not any(os.path.exists(directory) for directory in directories)
    with pytest.raises(HarnessError, match="closed"):
        pool.wait(lost)
    with pytest.raises(HarnessError, match="closed"):
        pool.submit(1, b"")


def test_a_temporary_directory_that_is_removed_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(gone))
    with Pool(TARGET, patience_s=1.0) as pool:
        assert answers(pool.wait(pool.submit(2, b"reduce"))) == [2.0, 2.0]
        asleep = pool.submit(2, b"sleep 60")
        shutil.rmtree(gone)
        with pytest.raises(FileNotFoundError) as caught:
            pool.wait(asleep)
    assert (shortage(caught.value) or "").startswith(f"{gone}/zerocheck-ranks-")
    assert "was removed while zerocheck used it; run again" in (shortage(caught.value) or "")
    assert shortage(FileNotFoundError(2, "none", "/home/me/data")) is None


def test_a_killed_zygote_is_replaced() -> None:
    with Pool(TARGET) as pool:
        pool.wait(pool.submit(2, b""))
        pids = pool.rank_pids[2]
        pending = pool.submit(2, b"sleep 60")
        psutil.Process(pool.zygote_pid).kill()
        result = pool.wait(pending)
        assert result.outcome == "crashed"
        assert "the process that starts ranks was killed" in result.reason
        until = time.monotonic() + 3
        while any(map(psutil.pid_exists, pids)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not any(map(psutil.pid_exists, pids))
        assert answers(pool.wait(pool.submit(2, b"reduce"))) == [2.0, 2.0]


def test_a_target_that_cannot_be_loaded() -> None:
    with (
        Pool("ranks_targets:no_such") as pool,
        pytest.raises(HarnessError, match=r"(?s)its imports failed.*no attribute 'no_such'"),
    ):
        pool.wait(pool.submit(1, b""))
    with pytest.raises(ValueError, match="a target is written"):
        load_target("nonsense")


def test_a_stopped_rank_is_a_hang_that_says_so(ask: Ask) -> None:
    result = ask(2, "stop_one")
    assert result.outcome == "hung" and result.duration_s < 20
    assert "rank 0 is stopped, by SIGSTOP or another signal that stops" in result.reason


def test_children_with_a_session_of_their_own_end_with_their_rank(
    shared_pool: Pool, ask: Ask
) -> None:
    pids = [int(str(pid)) for pid in answers(ask(2, "daemon", fresh=True))]
    until = time.monotonic() + 4
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))
    assert answers(ask(2, "reduce")) == [2.0, 2.0]
