"""One rank: a forked process that joins its process group once and then runs job after job."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import mmap
import os
import resource
import signal
import socket
import sys
import time

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from zerocheck.machine import place_variables
from zerocheck.machine.devices import CPU
from zerocheck.machine.hosts import places
from zerocheck.machine.signals import die_with
from zerocheck.ranks.arena import Arena
from zerocheck.ranks.context import RankContext, Target
from zerocheck.ranks.device import backend_of, prepare, shares
from zerocheck.ranks.failures import describe
from zerocheck.ranks.limits import MemoryBound
from zerocheck.ranks.messages import JobMessage, Raised, Reply, Spawn, frame, receive
from zerocheck.ranks.progress import Board, Progress
from zerocheck.ranks.scratch import log_path, rendezvous_path, stack_path
from zerocheck.ranks.view import KEPT_BYTES

GROUP_TIMEOUT_S = 600.0
"""Far behind the parent's watchdog, which is to be first."""
_LOG_LIMIT = 1 << 20


def run(target: Target, spawn: Spawn, rank: int, sock: socket.socket, zygote: int) -> None:
    """Serve jobs until the parent closes the socket. Runs right after the fork."""
    _bind_to(zygote)
    _redirect(spawn.directory, rank)
    os.environ.update(launcher_environment(rank, spawn.world_size, spawn.hosts))
    hosts = spawn.hosts
    place_variables.watch()
    torch.set_num_threads(1)
    gc.enable()
    board = Board(spawn.board, spawn.world_size)
    progress = Progress(board.page, rank)
    broken: Raised | None = None
    device = spawn.device
    try:
        if device != CPU:
            progress.at("starting the GPU")
            device = str(prepare(device, int(os.environ["LOCAL_RANK"])))
        progress.at("joining the process group")
        _join(spawn, rank)
    except Exception as error:
        broken = describe(error, harness=True)
    progress.finish(0)
    arenas: dict[int, Arena] = {}
    tidy = Tidy()
    decoder = msgspec.msgpack.Decoder(JobMessage)
    me = os.getpid()
    while True:
        try:
            job = receive(sock, decoder)
        except (EOFError, ConnectionError):
            return
        _wait_for_others(board, job.sequence - 1)
        if board.any_raised(job.floor, job.sequence) or not board.agree(job.sequence - 1):
            now = time.monotonic()
            reply = Reply(job.sequence, False, now, now, None, None, "", 0)
        else:
            arena = arenas.get(job.arena)
            if arena is None:
                name = f"arena-{rank}-{job.arena}"
                arena = arenas[job.arena] = Arena(name, spawn.arena_directories)
            arena.reset()
            progress.begin(job.sequence, _log_offset())
            if job.hosts != hosts:
                hosts = job.hosts
                os.environ.update(_place(rank, spawn.world_size, hosts))
            context = RankContext(rank, spawn.world_size, arena, progress, device)
            reply = execute(target, job.sequence, job.payload, context, broken, room=job.room)
            if os.getpid() != me:  # user code forked, and its child came back to here
                os._exit(0)
            if reply.error is not None or not reply.fit:
                progress.raised(job.sequence)
            progress.counted(job.sequence, reply.collectives)
        try:
            sock.sendall(frame(reply))
        except ConnectionError:
            return
        progress.finish(job.sequence)
        if reply.error is not None:
            gc.collect()  # the tensors that the traceback kept
        tidy()


def execute(
    target: Target,
    sequence: int,
    payload: bytes,
    context: RankContext,
    broken: Raised | None = None,
    *,
    room: int = 0,
) -> Reply:
    """Run the target once. Whatever it raises, SystemExit included, is in the reply.

    room: bytes of memory that it may take, 0 for any number.
    """
    result: bytes | None = None
    began = time.monotonic()
    if broken is None:
        bound = MemoryBound(room)
        try:
            with bound:
                result = target(payload, context)
            if not isinstance(result, bytes):
                kind = type(result).__name__
                result = None
                raise TypeError(f"a target returns bytes, not {kind}")
        except BaseException as error:
            ended = time.monotonic()
            broken = describe(error, before=bound.words)
        else:
            ended = time.monotonic()
    else:
        ended = began
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    arena = context.arena
    return Reply(
        sequence,
        True,
        began,
        ended,
        result,
        broken,
        arena.path,
        arena.size,
        context.condition.leaks,
        context.condition.collectives,
        place_variables.were_read(),
    )


class Tidy:
    """Gives memory back after a job that left much of it: the judge needs room for its own."""

    def __init__(self) -> None:
        self._kept = _private_bytes()

    def __call__(self) -> None:
        """Free what jobs left since the last time, if it is more than a small model leaves."""
        if _private_bytes() - self._kept > KEPT_BYTES:
            gc.collect()
            with contextlib.suppress(OSError, AttributeError):  # glibc alone keeps what was freed
                ctypes.CDLL(None).malloc_trim(0)
            self._kept = _private_bytes()


def _private_bytes() -> int:
    """Memory that this process shares with no file; 0 where it is unknown."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as statm:
        _, resident, shared, *_ = map(int, statm.read().split())
        return (resident - shared) * mmap.PAGESIZE
    return 0


def launcher_environment(rank: int, world_size: int, hosts: tuple[int, ...]) -> dict[str, str]:
    """Environment variables that torchrun sets in a rank (torch.distributed.elastic's agent).

    Nobody listens at the address: the ranks have their process group already, so that who asks for
    the address (accelerate, Lightning) never connects.
    """
    values = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        **_place(rank, world_size, hosts),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": False,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
    }
    return {name: str(value) for name, value in values.items()}


def _place(rank: int, world_size: int, hosts: tuple[int, ...]) -> dict[str, str]:
    return place_variables.values(places(hosts, world_size), rank)


def _bind_to(zygote: int) -> None:
    """Die with the zygote; be a process group of one's own, so that children die along."""
    die_with(zygote)
    os.setpgid(0, 0)
    # An abort is expected here and there; its core file would cost seconds.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _redirect(directory: str, rank: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log = os.open(log_path(directory, rank), flags, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stacks = open(stack_path(directory, rank), "w")  # noqa: SIM115 - open for life
    faulthandler.enable(file=sys.stderr, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)


def _log_offset() -> int:
    offset = os.lseek(1, 0, os.SEEK_END)
    if offset > _LOG_LIMIT:
        os.ftruncate(1, 0)
        return 0
    return offset


def _join(spawn: Spawn, rank: int) -> None:
    # Ranks on several simulated hosts have the GPU of their local rank.
    shared = len(spawn.hosts) > 1 or shares(spawn.device, spawn.world_size)
    dist.init_process_group(
        backend_of(spawn.device, shared=shared, asked=spawn.backend),
        store=FileStore(rendezvous_path(spawn.directory), spawn.world_size),
        rank=rank,
        world_size=spawn.world_size,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
    )


def _wait_for_others(board: Board, sequence: int) -> None:
    """Wait until every rank is done with the job before.

    So a job that was sent ahead cannot begin next to one that fails, and none that dies at once
    can make another rank's joining fail. Dead ranks are the parent's
    affair: it kills this one too.
    """
    pause = 2e-5
    while not board.all_finished(sequence):
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
