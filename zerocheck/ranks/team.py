"""The ranks of one process group, seen from the parent: their sockets, board, arenas, end."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from zerocheck.errors import HarnessError
from zerocheck.machine.devices import CPU
from zerocheck.ranks.failures import trim_stack
from zerocheck.ranks.in_flight_job import InFlightJob
from zerocheck.ranks.messages import Exit, Inbox, Reply
from zerocheck.ranks.progress import Board
from zerocheck.ranks.scratch import Scratch, log_path, stack_path
from zerocheck.ranks.spawner import Spawner
from zerocheck.ranks.view import ArenaView, Mappings
from zerocheck.ranks.watchdog import Watchdog

_STACK_WAIT_S = 1.0
_DEATH_PATIENCE_S = 2.0
_OUTPUT_BYTES = 4000
_STACK_BYTES = 16000
_RECEIVE_BYTES = 1 << 18
_numbers = itertools.count(1)
_reply = msgspec.msgpack.Decoder(Reply).decode


class Team:
    """Jobs go in one after the other and run in that order; several may be under way."""

    def __init__(
        self,
        world_size: int,
        *,
        spawner: Spawner,
        scratch: Scratch,
        hosts: tuple[int, ...] = (),
        dedicated: bool = False,
        device: str = CPU,
        backend: str | None = None,
    ) -> None:
        """Ask for the ranks, and do not wait for them. Raises HarnessError or OSError.

        hosts: as in a case; what the ranks' environment says; device, backend: as of the pool.
        """
        self.world_size = world_size
        self.hosts = hosts
        """Hosts of the last job that was sent."""
        self._place_read = device != CPU
        """True once a rank has read on which host it is, or has the GPU of its place."""
        self.dedicated = dedicated
        self.jobs: deque[InFlightJob] = deque()
        self.gone: frozenset[int] = frozenset()
        self.failing = False
        self.alive = True
        self.used_at = time.monotonic()
        self._spawner = spawner
        self._sequence = 0
        self._floor = 0
        self._arenas = 0
        self._free: list[int] = []
        self._mappings = Mappings()
        self._pids: list[int] | None = None
        self._exits: dict[int, Exit] = {}
        self.number = number = next(_numbers)
        self.retired = False
        """True for a team that gets no further jobs."""
        self.garbled: frozenset[int] = frozenset()
        """Ranks that wrote to the socket of their replies what is no reply."""
        self.orphaned = False
        """The process that starts ranks was killed, and these with it."""
        self._directory = scratch.make(scratch.slow, f"team-{number}")
        # With one directory for all the fast one is the slow one; the names must differ.
        self._arena_directories = [
            scratch.make(base, f"arenas-{number}") for base in scratch.directories
        ]
        board, self.board = _make_board(self._arena_directories, world_size)
        self.watchdog = Watchdog(self.board)
        self.sockets: list[socket.socket] = []
        far_ends = []
        try:
            for _ in range(world_size):
                near, far = socket.socketpair()
                self.sockets.append(near)
                far_ends.append(far)
                near.setblocking(False)
            self._ticket = spawner.spawn(
                far_ends,
                directory=self._directory,
                board=board,
                arena_directories=self._arena_directories,
                hosts=hosts,
                device=device,
                backend=backend,
            )
        except BaseException:
            for sock in self.sockets:
                sock.close()
            self._remove_files()
            raise
        finally:
            for far in far_ends:
                far.close()
        self._inboxes = [Inbox() for _ in range(world_size)]
        self._unsent = [bytearray() for _ in range(world_size)]

    @property
    def accepting(self) -> bool:
        """True if a job may be sent."""
        return self.alive and not self.failing and not self.gone and not self.retired

    @property
    def movable(self) -> bool:
        """True if the ranks may be told other hosts: nothing in them can depend on theirs."""
        return not (self.jobs or self.dedicated or self._place_read) and self.accepting

    def pids(self) -> list[int]:
        """In rank order. Waits for the zygote. Raises HarnessError when that is gone."""
        if self._pids is None:
            self._pids = self._spawner.spawned(self._ticket)
        return self._pids

    # Jobs out, replies in

    def send(self, job: InFlightJob) -> None:
        """Queue the job and write what the sockets take at once; `flush` writes the rest."""
        self._sequence += 1
        self.hosts = job.hosts
        arena = self._free.pop() if self._free else self._arenas
        self._arenas = max(self._arenas, arena + 1)
        for rank, data in enumerate(job.prepare(self._sequence, arena, self._floor)):
            self._unsent[rank] += data
        if not self.jobs:
            self.start_watch()
        self.jobs.append(job)
        self.flush()

    def start_watch(self) -> None:
        """Another job is at the head: its patience starts now."""
        self.watchdog = Watchdog(self.board)

    def flush(self) -> None:
        for rank, unsent in enumerate(self._unsent):
            while unsent and rank not in self.gone:
                try:
                    del unsent[: self.sockets[rank].send(unsent)]
                except BlockingIOError:
                    break
                except OSError:
                    self.gone |= {rank}

    @property
    def has_unsent(self) -> bool:
        return any(self._unsent)

    def receive(self, rank: int) -> bool:
        """Take what the rank sent. False at the end of its stream."""
        while True:
            try:
                chunk = self.sockets[rank].recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                chunk = b""
            if not chunk:
                self.gone |= {rank}
                return False
            try:
                replies = [_reply(body) for body in self._inboxes[rank].take(chunk)]
            except ValueError:  # msgspec's are such: something else wrote to the socket
                self.garbled |= {rank}
                self.gone |= {rank}
                return False
            for reply in replies:
                self._place_read |= reply.place_read
                for job in self.jobs:
                    if job.sequence == reply.sequence:
                        job.replies[rank] = reply
            if len(chunk) < _RECEIVE_BYTES:
                return True

    def take_head(self) -> InFlightJob:
        """Remove the head, all of whose replies were seen."""
        job = self.jobs.popleft()
        self._floor = job.sequence
        self.used_at = time.monotonic()
        if self.jobs:
            self.start_watch()
        return job

    def died_early(self, job: InFlightJob) -> bool:
        """Return True if a rank died without beginning the job: that is not the job's fault."""
        return any(self.board.begun(rank) < job.sequence for rank in self.gone)

    # Arenas

    def view(self, rank: int, job: InFlightJob) -> ArenaView | None:
        """Open the arena of a rank that replied. Raises OSError where its file was removed."""
        reply = job.replies.get(rank)
        if reply is None or not reply.started:
            return None
        return self._mappings.view(rank, job.arena, reply.arena_path, reply.arena_bytes)

    def free(self, arena: int) -> None:
        """The parent is done with the arenas of that number."""
        self._mappings.forget_large(arena)
        self._free.append(arena)

    # The end

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """The Python stacks of living ranks, though they may be stuck in C++."""
        paths = {rank: stack_path(self._directory, rank) for rank in ranks}
        for rank in paths:
            # The zygote has reaped none of them, so the pid is still theirs.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids()[rank], signal.SIGUSR1)
        sizes: dict[int, int] = {}
        deadline = time.monotonic() + _STACK_WAIT_S
        while time.monotonic() < deadline:
            time.sleep(0.02)
            now = {rank: _size(path) for rank, path in paths.items()}
            if all(now.values()) and now == sizes:
                break
            sizes = now
        return {rank: trim_stack(_read(path, 0, _STACK_BYTES)) for rank, path in paths.items()}

    def output(self, rank: int) -> str:
        """The end of what the rank wrote to stdout and stderr since its last job began."""
        start = self.board.read(rank).log_offset
        return trim_stack(_read(log_path(self._directory, rank), start, _OUTPUT_BYTES))

    def look_for_the_dead(self, ranks: Iterable[int]) -> None:
        """Note ranks that died and whose sockets do not show it: a child that they forked holds
        them open."""
        self.gone |= {rank for rank in ranks if _is_zombie(self.pids()[rank])}

    def exits(self) -> dict[int, Exit]:
        """Collect the ends of those ranks that ended on their own."""
        self._reap(sorted(self.gone), _DEATH_PATIENCE_S)
        return {rank: self._exits[rank] for rank in self.gone}

    def kill(self) -> None:
        """End all ranks. Views that were handed out stay readable."""
        if not self.alive:
            return
        self.alive = False
        try:
            self._reap(range(self.world_size), 0.0)
        finally:
            for sock in self.sockets:
                sock.close()
            self._remove_files()

    def _reap(self, ranks: Iterable[int], patience_s: float) -> None:
        # Never twice: a pid that was reaped may belong to somebody else by now.
        ranks = [rank for rank in ranks if rank not in self._exits]
        if ranks:
            pids = [self.pids()[rank] for rank in ranks]
            try:
                ends = self._spawner.reap(pids, patience_s=patience_s)
            except HarnessError:
                if self._spawner.alive or _exists(self._spawner.pid):
                    raise
                self.orphaned = True
                ends = [Exit(pid, -signal.SIGKILL, time.monotonic()) for pid in pids]
            self._exits.update(zip(ranks, ends, strict=True))

    def _remove_files(self) -> None:
        for directory in {self._directory, *self._arena_directories}:
            shutil.rmtree(directory, ignore_errors=True)


def _make_board(directories: Sequence[str], world_size: int) -> tuple[str, Board]:
    for directory in directories[:-1]:
        path = os.path.join(directory, "board")
        with contextlib.suppress(OSError):
            return path, Board(path, world_size, create=True)
    path = os.path.join(directories[-1], "board-2")
    return path, Board(path, world_size, create=True)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _is_zombie(pid: int) -> bool:
    """Return True if a process ended and nobody reaped it; False where there is no /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] == b"Z"
    except (OSError, IndexError):
        return False


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _read(path: str, start: int, limit: int) -> str:
    """The last `limit` bytes after `start`."""
    try:
        with open(path, "rb") as file:
            file.seek(max(start, _size(path) - limit))
            return file.read().decode("utf-8", "replace").strip()
    except OSError:
        return ""
