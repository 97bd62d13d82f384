"""One rank under torchrun: joins process groups, performs jobs, reports through the store."""

from __future__ import annotations

import datetime
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from zerocheck.errors import RanksLost, UsageError
from zerocheck.machine.launcher import Wait, check_environment, choose_interface, host_number
from zerocheck.ranks.arena import Arena
from zerocheck.ranks.context import RankContext, load_target
from zerocheck.ranks.device import GLOO, prepare, shares
from zerocheck.ranks.failures import describe, is_echo
from zerocheck.ranks.heartbeat import Beat, Heartbeat
from zerocheck.ranks.messages import Message, Raised, Reply
from zerocheck.ranks.progress import Board, Progress, RankPosition
from zerocheck.ranks.remote_arenas import WHOLE_BYTES, Answers
from zerocheck.ranks.result import RankOutcome
from zerocheck.ranks.scratch import Scratch
from zerocheck.ranks.store_mail import StoreMail
from zerocheck.ranks.worker import Tidy, execute

_LOOK_S = 0.1


class Order(Message, frozen=True):
    """Order to a rank: its next job. `group` counts the process groups; -1 ends the run.

    `code`: the exit code then; `backend` and `timeout_s`: of the process group.
    """

    group: int
    arena: int
    machine: str
    code: int = 0
    backend: str = GLOO
    timeout_s: float = 0.0


class RankReport(Message, frozen=True):
    """A reply with the rank's record. `used`: bytes of arena that are on another machine, or -1;
    `mailed`: they follow in the store."""

    reply: Reply
    standing: RankPosition
    used: int = -1
    mailed: bool = False


class ReceivedJob(Message, frozen=True):
    """Where a rank is: its host, as the launcher numbers or names it; shares: whether it has a GPU
    together with others."""

    host: str
    name: str
    shares: bool = False


encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_report = msgspec.msgpack.Decoder(RankReport).decode
decode_arrived = msgspec.msgpack.Decoder(ReceivedJob).decode


def machine() -> str:
    """Equal for processes that see the same files in the same memory."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()} {os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        return socket.gethostname()


class TorchrunRank:
    """Duties of every rank, rank 0 included."""

    def __init__(self, target: str, *, device: str) -> None:
        """Waits for the other ranks. Raises UsageError outside of torchrun."""
        check_environment()
        choose_interface()
        self.device = str(prepare(device, int(os.environ.get("LOCAL_RANK", "0"))))
        self.shares = shares(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        torch.set_num_threads(1)  # as the judge; torchrun sees to it only for several ranks a host
        self._target = load_target(target)
        store, self.rank, self.world_size = _meet()
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
        self._tidy = Tidy()
        self._group = -1
        self._answers = Answers(self.mail, self.rank)
        if self.rank != 0:
            arrived = ReceivedJob(host_number(), socket.gethostname(), self.shares)
            self.mail.put(f"arrived/{self.rank}", encode(arrived))

    def perform(self, number: int, order: Order, payload: bytes) -> Reply:
        """Join the group that the order names if need be, then run the target."""
        arena = self._arenas.get(order.arena)
        if arena is None:
            name = f"arena-{self.rank}-{order.arena}"
            arena = self._arenas[order.arena] = Arena(name, self._scratch.directories)
        arena.reset()
        self._progress.begin(number, 0)
        broken = self._join(order)
        context = RankContext(self.rank, self.world_size, arena, self._progress, self.device)
        reply = execute(self._target, number, payload, context, broken)
        self._tidy()
        return reply

    def serve_one(self, number: int) -> int | None:
        """Do what rank 0 orders next, and answer its questions until then.

        The exit code when that is to leave. Raises RanksLost when rank 0 is gone.
        """
        try:
            return self._serve_one(number)
        except RuntimeError as error:  # of the store: errors of user code are in the reply
            raise RanksLost(f"rank {self.rank} lost contact with rank 0: {error}") from error

    def _serve_one(self, number: int) -> int | None:
        key = f"order/{number}/{self.rank}"
        while not self.mail.wait(key, give_up=lambda: self._answers.answer_one(self._arenas)):
            pass
        order = decode_order(self.mail.take(key))
        if order.group < 0:
            self.mail.post(f"bye/{self.rank}", b"1")
            return order.code
        payload = self.mail.take(f"payload/{number}/{self.rank}")
        if self._heartbeat is not None:  # until the report is there: a slow link takes long
            self._heartbeat.start(f"beat/{number}/{self.rank}")
        try:
            reply = self.perform(number, order, payload)
            report = RankReport(reply, self.board.read(0))
            if order.machine != machine():
                arena = self._arenas[order.arena]
                mailed = arena.used <= WHOLE_BYTES
                if mailed:
                    self.mail.put(f"arena/{number}/{self.rank}", arena.packed())
                report = RankReport(reply, report.standing, arena.used, mailed)
            self.mail.put(f"report/{number}/{self.rank}", encode(report))
        finally:
            if self._heartbeat is not None:
                self._heartbeat.stop()
        return None

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        for arena in self._arenas.values():
            arena.close()
        self._scratch.remove()

    def _join(self, order: Order) -> Raised | None:
        """Make the default process group that is ordered; says why that failed, if it did."""
        if order.group == self._group:
            return None
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.init_process_group(
                order.backend,
                store=PrefixStore(f"group/{order.group}", self._store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=datetime.timedelta(seconds=order.timeout_s),
            )
        except Exception as error:
            return describe(error, harness=True)
        self._group = order.group
        return None


def _meet() -> tuple[Store, int, int]:
    """Meet the other ranks at the launcher's address. Raises UsageError where nobody answers.

    torch waits in C++, where Python sees no signal: so a thread waits, and this one looks.
    """
    came: SimpleQueue[tuple[Store, int, int] | Exception] = SimpleQueue()

    def meet() -> None:
        try:
            meeting: Iterator[tuple[Store, int, int]] = rendezvous("env://")
            came.put(next(meeting))
        except Exception as error:
            came.put(error)

    threading.Thread(target=meet, daemon=True).start()
    wait = Wait()
    while True:
        try:
            met = came.get(timeout=_LOOK_S)
        except Empty:
            wait.look()
            continue
        if isinstance(met, dist.DistError):
            raise UsageError(wait.words()) from met
        if isinstance(met, Exception):
            raise met
        return met


def rank_outcome(
    rank: int, report: RankReport | None, beat: Beat | None, *, late: bool
) -> RankOutcome:
    """`at_s` counts from the rank's own begin: clocks of two machines cannot be compared.

    late: what ranks raised was the end of their patience.
    """
    standing = beat if report is None else report.standing
    if standing is None:
        return RankOutcome(rank=rank, state="waiting")
    outcome = RankOutcome(
        rank=rank,
        state="waiting",
        where=standing.where,
        collective=standing.collective,
        collective_sequence=standing.collective_sequence,
        recent=standing.recent,
        stack=standing.stack if isinstance(standing, Beat) else "",
    )
    if report is None:
        return outcome
    error = report.reply.error
    if late and error is not None:
        return replace(outcome, stack=error.traceback)
    return replace(
        outcome,
        state="finished" if error is None else "raised",
        at_s=report.reply.ended - report.reply.began,
        type_name=error.type_name if error else "",
        text=error.text if error else "",
        traceback=error.traceback if error else "",
        echo=error is not None and is_echo(error),
    )
