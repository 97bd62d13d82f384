"""One rank under torchrun: joins process groups, performs jobs, reports through the store."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Iterator

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from zerocheck.errors import UsageError
from zerocheck.ranks.arena import Arena
from zerocheck.ranks.context import RankContext, load_target
from zerocheck.ranks.failures import describe
from zerocheck.ranks.heartbeat import Heartbeat
from zerocheck.ranks.messages import Message, Raised, Reply
from zerocheck.ranks.progress import Board, Progress, Standing
from zerocheck.ranks.scratch import Scratch
from zerocheck.ranks.store_mail import StoreMail
from zerocheck.ranks.worker import execute

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Order(Message, frozen=True):
    """What a rank is to do next. `group` counts the process groups; -1 ends the run."""

    group: int
    arena: int
    machine: str


class Report(Message, frozen=True):
    """A reply with the rank's record. `mailed` bytes of arena follow in the store."""

    reply: Reply
    standing: Standing
    mailed: int


encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def check_environment() -> None:
    """Raises UsageError outside of torchrun."""
    missing = [name for name in _ENVIRONMENT if name not in os.environ]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} not set: start this with `torchrun --nproc-per-node N ...`,"
            " or use --ranks processes"
        )


def machine() -> str:
    """Equal for processes that see the same files in the same memory."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()} {os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        return socket.gethostname()


class TorchrunRank:
    """What every rank does, rank 0 included."""

    def __init__(self, target: str, *, device: str, backend: str, timeout_s: float) -> None:
        """Waits for the other ranks. Raises UsageError outside of torchrun."""
        check_environment()
        self._target = load_target(target)
        self._device = device
        self._backend = backend
        self._timeout_s = timeout_s
        meeting: Iterator[tuple[Store, int, int]] = rendezvous("env://")
        store, self.rank, self.world_size = next(meeting)
        if device.startswith("cuda"):
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # torchrun's agent keeps the store over restarts: keys of a former life must not be read.
        prefix = f"zerocheck/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = PrefixStore(prefix, store)
        self.mail = StoreMail(self._store)
        self._scratch = Scratch()
        self.board = Board(os.path.join(self._scratch.fast, "board"), 1, create=True)
        self._progress = Progress(self.board.page, 0)
        self._heartbeat: Heartbeat | None = None
        if self.rank != 0 and hasattr(store, "clone"):
            self._heartbeat = Heartbeat(StoreMail(PrefixStore(prefix, store.clone())), self.board)
        self._arenas: dict[int, Arena] = {}
        self._group = -1

    def perform(self, number: int, order: Order, payload: bytes) -> Reply:
        """Join the group that the order names if need be, then run the target."""
        arena = self._arenas.get(order.arena)
        if arena is None:
            name = f"arena-{self.rank}-{order.arena}"
            arena = self._arenas[order.arena] = Arena(name, self._scratch.directories)
        arena.reset()
        self._progress.begin(number, 0)
        if self._heartbeat is not None:
            self._heartbeat.start(f"beat/{number}/{self.rank}")
        try:
            broken = self._join(order.group)
            context = RankContext(self.rank, self.world_size, arena, self._progress)
            return execute(self._target, number, payload, context, broken)
        finally:
            if self._heartbeat is not None:
                self._heartbeat.stop()

    def serve_one(self, number: int) -> bool:
        """Do what rank 0 orders next. False when that is to leave."""
        key = f"order/{number}/{self.rank}"
        self.mail.wait(key)
        order = decode_order(self.mail.take(key))
        if order.group < 0:
            self.mail.post(f"bye/{self.rank}", b"1")
            return False
        payload = self.mail.take(f"payload/{number}/{self.rank}")
        reply = self.perform(number, order, payload)
        mailed = 0
        if order.machine != machine():
            packed = self._arenas[order.arena].packed()
            mailed = len(packed)
            self.mail.put(f"arena/{number}/{self.rank}", packed)
        report = Report(reply, self.board.read(0), mailed)
        self.mail.put(f"report/{number}/{self.rank}", encode(report))
        return True

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        for arena in self._arenas.values():
            arena.close()
        self._scratch.remove()

    def _join(self, group: int) -> Raised | None:
        """Make the default process group number `group`; says why that failed, if it did."""
        if group == self._group:
            return None
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.init_process_group(
                self._backend,
                store=PrefixStore(f"group/{group}", self._store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=datetime.timedelta(seconds=self._timeout_s),
            )
        except Exception as error:
            return describe(error, harness=True)
        self._group = group
        return None
