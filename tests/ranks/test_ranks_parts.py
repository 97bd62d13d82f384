"""The parts that need no rank process: arena, progress, watchdog, cores, scratch, results."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

from zerocheck.errors import HarnessError
from zerocheck.machine.shortage import PROCESSES, is_ample
from zerocheck.ranks import ArenaView, JobResult, RankOutcome, Slot, worker
from zerocheck.ranks import arena as arena_module
from zerocheck.ranks.arena import Arena
from zerocheck.ranks.failures import describe, place_in_users_code, trim_stack
from zerocheck.ranks.messages import Inbox, JobMessage, frame
from zerocheck.ranks.progress import Board, Progress
from zerocheck.ranks.result import first_to_fail
from zerocheck.ranks.scratch import Scratch
from zerocheck.ranks.view import Mappings
from zerocheck.ranks.watchdog import Activity, Watchdog
from zerocheck.ranks.worker import Tidy


def look(arena: Arena) -> ArenaView:
    return Mappings().view(0, 0, arena.path, arena.size)


DTYPES = [
    torch.bool,
    torch.int8,
    torch.uint16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


class TestArena:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype_comes_back_bit_for_bit(self, tmp_path: Path, dtype: torch.dtype) -> None:
        arena = Arena("a", [str(tmp_path)])
        raw = torch.arange(160, dtype=torch.uint8) % (2 if dtype is torch.bool else 100)
        one = raw.view(dtype)
        for tensors in ([one], [one, one[:3]], [one] * 3000):
            slot = arena.put(tensors)
            assert slot.offset % 64 == 0
            expected = torch.cat([t.view(torch.uint8) for t in tensors])
            assert torch.equal(look(arena).tensor(slot).view(torch.uint8), expected)

    @pytest.mark.parametrize("many", [1, 5000])
    def test_strides_scalars_and_nothing(self, tmp_path: Path, many: int) -> None:
        arena = Arena("a", [str(tmp_path)])
        base = torch.randn(6, 4, requires_grad=True)
        shapes = [base.t(), base[::2, 1:3], base[0, 0], base[:0], torch.nn.Parameter(base[1:2])]
        for tensors in ([shape] for shape in shapes):
            slot = arena.put(tensors)
            assert torch.equal(look(arena).tensor(slot), tensors[0].reshape(-1))
        slot = arena.put(shapes * many)
        expected = torch.cat([t.detach().reshape(-1) for t in shapes * many])
        assert torch.equal(look(arena).tensor(slot), expected)
        assert look(arena).tensor(arena.put([])).numel() == 0

    def test_filled_fresh_memory_does_not_matter(self, tmp_path: Path) -> None:
        arena = Arena("a", [str(tmp_path)])
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.utils.deterministic.fill_uninitialized_memory
            for tensors in ([torch.ones(3), torch.ones(2)], [torch.ones(30000)] * 2):
                slot = arena.put(tensors)
                assert look(arena).tensor(slot).eq(1).all()
        finally:
            torch.use_deterministic_algorithms(False)

    def test_one_dtype_to_a_slot(self, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match="one dtype"):
            Arena("a", [str(tmp_path)]).put([torch.ones(1), torch.ones(1).double()])

    def test_slots_survive_growth_and_files_are_reused(self, tmp_path: Path) -> None:
        arena = Arena("a", [str(tmp_path)], first_bytes=4096, kept_bytes=1 << 20)
        slots = [arena.put([torch.full((500,), float(i))]) for i in range(20)]
        view = look(arena)
        assert all(view.tensor(slot).eq(i).all() for i, slot in enumerate(slots))
        path = arena.path
        arena.reset()
        assert (arena.path, arena.used) == (path, 0)
        arena.put([torch.ones(1 << 19)])
        arena.reset()  # too large to keep
        assert arena.path == "" and not os.listdir(tmp_path)
        assert view.tensor(slots[3]).numel() == 500  # no SIGBUS from a file that is gone
        arena.put([torch.ones(3)])
        assert arena.size == 4096

    def test_a_full_file_system_moves_the_arena(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        small, large = tmp_path / "small", tmp_path / "large"
        small.mkdir()
        large.mkdir()
        real = arena_module.reserve

        def reserve(descriptor: int, size: int) -> None:
            if "small" in os.readlink(f"/proc/self/fd/{descriptor}") and size > 8192:
                raise OSError(errno.ENOSPC, "full")
            real(descriptor, size)

        monkeypatch.setattr(arena_module, "reserve", reserve)
        arena = Arena("a", [str(small), str(large)], first_bytes=4096)
        first = arena.put([torch.arange(1000.0)])
        assert str(small) in arena.path
        second = arena.put([torch.arange(5000.0)])
        assert str(large) in arena.path and not os.listdir(small)
        assert torch.equal(look(arena).tensor(first), torch.arange(1000.0))
        assert torch.equal(look(arena).tensor(second), torch.arange(5000.0))

    def test_what_is_large_leaves_half_of_the_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(arena_module, "KEPT_BYTES", 1 << 20)
        monkeypatch.setattr("zerocheck.machine.host.total_bytes", lambda: 100 << 20)
        left = [60 << 20]
        monkeypatch.setattr("zerocheck.machine.host.available_bytes", lambda: left[0])
        memory, disk = tmp_path / "memory", tmp_path / "disk"
        memory.mkdir()
        disk.mkdir()
        arena = Arena("a", [str(memory), str(disk)])
        first = arena.put([torch.arange(2.0**20)])  # 4 MiB: 56 are left
        assert str(memory) in arena.path
        left[0] = 51 << 20
        second = arena.put([torch.arange(2.0**20)])
        assert str(disk) in arena.path and not os.listdir(memory)
        for slot in (first, second):
            assert torch.equal(look(arena).tensor(slot), torch.arange(2.0**20))
        # What is small is no matter.
        left[0] = 0
        arena = Arena("b", [str(memory), str(disk)])
        arena.put([torch.ones(3)])
        assert str(memory) in arena.path

    def test_a_large_one_reserves_little_more_than_it_needs(self, tmp_path: Path) -> None:
        arena = Arena("a", [str(tmp_path)], first_bytes=128 << 20)
        arena.put([torch.empty(130 << 20, dtype=torch.uint8)])
        assert arena.size == 144 << 20
        arena.put([torch.empty(60 << 20, dtype=torch.uint8)])
        assert arena.size == 190 << 20
        arena.close()

    def test_a_large_one_is_given_back_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Though its rank has it open still, until its next job."""
        monkeypatch.setattr("zerocheck.ranks.view.KEPT_BYTES", 1 << 20)
        for count, kept in ((3, True), (1 << 20, False)):
            arena = Arena("a", [str(tmp_path)], kept_bytes=1 << 20)
            slot = arena.put([torch.ones(count)])
            mappings = Mappings()
            view = mappings.view(0, 0, arena.path, arena.size)
            assert view.tensor(slot).eq(1).all()
            mappings.forget_large(1)
            assert os.stat(arena.path).st_blocks > 0
            mappings.forget_large(0)
            assert (os.stat(arena.path).st_blocks > 0) == kept
            assert (mappings.view(0, 0, arena.path, arena.size)._mapping is view._mapping) == kept
            arena.close()

    def test_nowhere_any_room(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(descriptor: int, size: int) -> None:
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(arena_module, "reserve", full)
        with pytest.raises(HarnessError, match=r"no room for 1 MiB.*set TMPDIR"):
            Arena("a", [str(tmp_path)]).put([torch.ones(1)])
        assert not os.listdir(tmp_path)

    def test_some_shared_memory_is_left_to_others(self, tmp_path: Path) -> None:
        huge = os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
        with pytest.raises(OSError, match="No space"):
            arena_module._refuse_the_last_room(str(tmp_path), huge)

    @pytest.mark.parametrize("slot", [Slot(0, 5, "float32"), Slot(-8, 1, "int8"), Slot(0, 1, "x")])
    def test_a_slot_outside_is_refused(self, slot: Slot) -> None:
        with pytest.raises(ValueError, match=r"outside of the arena|no such dtype"):
            ArenaView(bytearray(16)).tensor(slot)


class TestProgress:
    def test_is_read_by_another_mapping(self, tmp_path: Path) -> None:
        path = str(tmp_path / "board")
        Board(path, 3, create=True)
        progress = Progress(Board(path, 3).page, 1)
        board = Board(path, 3)
        progress.begin(7, 123)
        progress.at("étape " + "x" * 600)
        progress.collective("all_gather", 9)
        standing = board.read(1)
        assert standing.where.startswith("étape xxx")
        assert standing[2:6] == ("all_gather", 9, 7, 123)
        assert standing.counter == board.counter(1) == 3
        assert board.read(0).counter == board.read(2).counter == 0

    def test_the_last_collectives_of_a_job(self, tmp_path: Path) -> None:
        """Of all ranks at the same places, of this job alone, and next to no other rank's."""
        board = Board(str(tmp_path / "board"), 2, create=True)
        ranks = [Progress(board.page, rank) for rank in range(2)]
        for rank, last in ((0, 40), (1, 30)):
            for number in range(1, last + 1):
                ranks[rank].collective(f"allreduce({number})", number)
        first, second = (board.read(rank).recent for rank in range(2))
        assert max(first) == 40 and max(second) == 30 and min(first) <= 20
        common = first.keys() & second.keys()
        assert len(common) > 10 and all(first[one] == second[one] for one in common)
        assert len({*first.values()}) == len(first)
        ranks[0].begin(2, 0)
        assert board.read(0).recent == {} and board.read(1).recent == second
        ranks[0].collective("barrier", 1)
        assert board.read(0).recent.keys() == {1}


class TestWatchdog:
    @pytest.fixture
    def world(self, tmp_path: Path) -> _World:
        return _World(tmp_path)

    def test_quiet(self, world: _World) -> None:
        assert world.until_verdict() == ("quiet", pytest.approx(10, abs=1))

    def test_progress_is_life(self, world: _World) -> None:
        assert world.until_verdict(each=lambda: world.progress.at("")) == (None, 100)

    def test_work_is_life_up_to_the_ceiling(self, world: _World) -> None:
        def work() -> None:
            world.ticks += 10

        assert world.until_verdict(each=work) == ("ceiling", pytest.approx(60, abs=1))

    def test_a_rank_that_waits_for_a_core_is_not_hung(self, world: _World) -> None:
        world.asleep = False
        assert world.until_verdict(limit_s=50) == (None, 50)
        assert world.dog.awake == {0}

    def test_a_little_polling_is_no_life(self, world: _World) -> None:
        def poll() -> None:
            world.ticks += 1 if int(world.now) % 2 and world.now % 1 < 0.2 else 0

        assert world.until_verdict(each=poll)[0] == "quiet"

    def test_time_counts_only_while_somebody_looks(self, world: _World) -> None:
        world.look()
        for _ in range(5):
            world.now += 1000  # the parent was busy, or the machine asleep
            assert world.look() is None


class _World:
    """One rank, and a clock that moves by hand."""

    def __init__(self, directory: Path) -> None:
        path = str(directory / "board")
        board = Board(path, 1, create=True)
        self.progress = Progress(board.page, 0)
        self.now = 0.0
        self.ticks = 0
        self.asleep = True
        self.dog = Watchdog(
            board, clock=lambda: self.now, look=lambda pid: Activity(self.ticks, self.asleep)
        )

    def look(self) -> str | None:
        return self.dog.look([0], [1], patience_s=10.0, ceiling_s=60.0)

    def until_verdict(
        self, *, each: object = lambda: None, limit_s: float = 100
    ) -> tuple[str | None, float]:
        assert callable(each)
        while self.now < limit_s:
            each()
            if verdict := self.look():
                return verdict, self.now
            self.now += 0.25
        return None, self.now


class TestScratch:
    def test_without_shared_memory(self, tmp_path: Path) -> None:
        scratch = Scratch(shared_memory=str(tmp_path / "none"))
        assert scratch.directories == [scratch.slow]
        assert os.stat(scratch.slow).st_mode & 0o777 == 0o700
        scratch.remove()
        assert not os.path.exists(scratch.slow)

    def test_leftovers_of_the_dead_are_removed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        old = Scratch(shared_memory="/none")
        os.utime(old.slow, (0, 0))
        Scratch(shared_memory="/none").remove()
        assert os.path.exists(old.slow)  # its owner lives
        for lock in old._locks:
            os.close(lock)
        Scratch(shared_memory="/none").remove()
        assert not os.path.exists(old.slow)


def test_frames_come_out_whole_however_they_are_cut() -> None:
    data = b"".join(frame(JobMessage(n, 0, b"x" * n, 0)) for n in range(20))
    for step in (1, 7, 100, len(data)):
        inbox = Inbox()
        pieces = (data[at : at + step] for at in range(0, len(data), step))
        assert sum(1 for piece in pieces for _ in inbox.take(piece)) == 20


def test_the_first_to_fail_is_not_an_echo() -> None:
    stood = (
        RankOutcome(0, "raised", at_s=0.9, echo=True),
        RankOutcome(1, "killed", at_s=1.0, signal_name="SIGKILL"),
        RankOutcome(2, "waiting"),
    )
    assert first_to_fail(stood) == 1
    assert first_to_fail(stood[:1]) == 0
    assert first_to_fail(stood[2:]) is None
    text = JobResult("crashed", (None,) * 3, (None,) * 3, stood, 1.5, first_failed=1).summary()
    assert text.splitlines()[0] == "crashed after 1.5 s; rank 1 failed first"
    assert "  rank 1 died of SIGKILL" in text


def test_the_line_of_the_users_code_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of torch, of zerocheck or of Python's own library; nearest to where it stopped."""
    monkeypatch.chdir("/")
    in_torch = os.path.join(os.path.dirname(torch.__file__), "distributed.py")
    ours = os.path.abspath(place_in_users_code.__code__.co_filename)
    threads = os.path.abspath(threading.__file__)
    calls = [
        (ours, 30, "train_step"),
        ("/home/me/train.py", 7, "outer"),
        ("/home/me/my_ddp.py", 11, "average"),
        ("/opt/lib/site-packages/einops/einops.py", 5, "rearrange"),
        (in_torch, 3, "all_reduce"),
        (threads, 9, "wait"),
    ]
    traceback = "Traceback (most recent call last):\n" + "".join(
        f'  File "{path}", line {line}, in {name}\n    code\n' for path, line, name in calls
    )
    stack = "Current thread 0x1 (most recent call first):\n" + "".join(
        f'  File "{path}", line {line} in {name}\n' for path, line, name in reversed(calls)
    )
    assert place_in_users_code(traceback) == "average (home/me/my_ddp.py:11)"
    assert place_in_users_code(stack) == "average (home/me/my_ddp.py:11)"
    monkeypatch.chdir("/usr")
    assert place_in_users_code(stack) == "average (/home/me/my_ddp.py:11)"
    installed = stack.replace("/home/me/", "/opt/lib/site-packages/mine/")
    assert place_in_users_code(installed).startswith("rearrange (")
    assert place_in_users_code(f'  File "{in_torch}", line 3 in all_reduce\n') == ""
    assert place_in_users_code("RuntimeError: no frames") == ""
    stood = RankOutcome(1, "waiting", where="step 0", stack=stack, collective="allreduce(3)")
    assert stood.headline() == (
        "rank 1 waited at step 0, in average (/home/me/my_ddp.py:11), last collective "
        "allreduce(3) #0"
    )


def test_stacks_end_where_the_harness_begins() -> None:
    text = (
        "Current thread 0x1 (most recent call first):\n"
        '  File "user.py", line 1 in loss\n'
        f'  File "{os.path.join("zerocheck", "ranks", "worker.py")}", line 9 in execute\n'
        '  File "zygote.py", line 9 in main\n'
        "\nThread 0x2 (most recent call first):\n"
        '  File "other.py", line 2 in run\n'
        "\nExtension modules: numpy (total: 1)\n"
    )
    trimmed = trim_stack(text)
    assert "loss" in trimmed and "other.py" in trimmed
    assert "zygote" not in trimmed and "Extension" not in trimmed


def test_a_rank_gives_back_what_a_large_model_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cycles too, which hold tensors until somebody looks; what is small is left alone."""
    mib = 1 << 20
    readings = iter([1000 * mib, 1100 * mib, 1300 * mib, 1000 * mib])
    monkeypatch.setattr(worker, "_private_bytes", lambda: next(readings))
    tidy = Tidy()
    cycle: list[object] = [torch.ones(1)]
    cycle.append(cycle)
    tensor = weakref.ref(cycle[0])
    gc.disable()
    try:
        del cycle
        tidy()
        assert tensor() is not None
        tidy()
        assert tensor() is None
    finally:
        gc.enable()


def test_the_memory_of_a_process_grows_with_what_it_allocates() -> None:
    code = (
        "from zerocheck.ranks.worker import _private_bytes\n"
        "before = _private_bytes()\n"
        "kept = bytearray(b'1') * (300 << 20)\n"
        "print(_private_bytes() - before)"
    )
    grown = int(subprocess.check_output([sys.executable, "-c", code]))
    assert 290 << 20 <= grown <= 400 << 20


def test_advice_of_an_error_stands_in_the_headline() -> None:
    """And no other note of it, nor a further line of its message."""
    error = RuntimeError("first line\nsecond line")
    error.add_note("zerocheck: give it a device")
    error.add_note("a note of the user's")
    raised = describe(error)
    outcome = RankOutcome(0, "raised", type_name=raised.type_name, text=raised.text)
    text = "rank 0 raised RuntimeError: first line (zerocheck: give it a device)"
    assert outcome.headline() == text


def test_a_message_that_ends_with_a_colon_has_what_caused_it() -> None:
    error = RuntimeError("Failed to run stage backward:\nStage input: ...")
    error.__cause__ = ValueError("no views")
    first = "Failed to run stage backward: ValueError('no views')"
    assert describe(error).text.splitlines() == [first, "Stage input: ..."]


def test_files_of_ranks_are_not_where_output_goes(tmp_path: Path) -> None:
    """Code that closed its output may still print, from C++ too."""
    text = """
import os, sys
from zerocheck.machine.host import open_above
os.close(1)
found = open_above(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.write(1, b"printed")  # to nowhere
os.write(2, f"{found} {os.path.getsize(sys.argv[1])}".encode())
"""
    command = [sys.executable, "-c", text, str(tmp_path / "arena")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    number, size = map(int, done.stderr.split())
    assert number > 2 and size == 0


def test_where_memory_is_limited_no_want_of_threads_is_the_codes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zerocheck.machine.shortage.startable", lambda count: count)
    for limit, ample in ((1 << 29, False), (1 << 34, True), (resource.RLIM_INFINITY, True)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        assert is_ample(PROCESSES, 2) is ample
