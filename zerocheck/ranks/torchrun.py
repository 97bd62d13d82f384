"""The pool's API over ranks that torchrun started.

Rank 0 submits and waits, and does its own part of each job while it waits; the others `serve`.
Control goes through the launcher's store and not through the collectives under test. Ranks that
a launcher started cannot be killed and restarted: a rank that never comes back ends the run.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import NoReturn

from zerocheck.errors import HarnessError, RanksLost, UsageError
from zerocheck.machine import signals
from zerocheck.machine.hosts import Hosts, counts, spelled
from zerocheck.machine.launcher import Wait, host_number
from zerocheck.machine.shortage import is_ample, shortage
from zerocheck.ranks.device import backend_of
from zerocheck.ranks.failures import is_echo, is_timeout
from zerocheck.ranks.heartbeat import Beat, moved, read_beat
from zerocheck.ranks.in_flight_job import denied
from zerocheck.ranks.post_mortem import denied_since, shortage_of
from zerocheck.ranks.remote_arenas import BytesCache, LocalView, Post, RemoteView, received
from zerocheck.ranks.result import JobResult, at_one_place, first_to_fail, fit, leaks_of, once
from zerocheck.ranks.torchrun_rank import (
    Order,
    RankReport,
    TorchrunRank,
    decode_arrived,
    decode_report,
    encode,
    machine,
    rank_outcome,
)
from zerocheck.ranks.view import ArenaView, Mappings

TIMEOUT_S = 60.0
"""Of the process group: no collective of a drawn case takes that long, slow links included."""

_PATIENT = 4
"""Times the timeout, where ranks that ran out of it stand all at one place."""
_SPARE_S = 10.0
_GOODBYE_S = 5.0
_LOST_S = 20.0
"""Without a beat, of which a living rank sends one in a second."""
_ARRIVAL_S = 300.0


class TorchrunPending:
    """A submitted job. Give it to `TorchrunPool.wait`."""

    def __init__(self, payloads: Sequence[bytes], *, fresh: bool) -> None:
        self._payloads = payloads
        self._fresh = fresh
        self._result: JobResult | None = None

    @property
    def done(self) -> bool:
        return self._result is not None


class TorchrunPool:
    """One world size, that of the launcher. Constructed on every rank."""

    def __init__(
        self,
        target: str,
        *,
        device: str = "cpu",
        backend: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`backend`: gloo or nccl, None for what fits: see ranks/device.py.

        `timeout_s` is the process group's: a collective that waits for longer raises. A clock
        cannot tell ranks that hang from slow ones: where all ran out of time at one place, the job
        is done again, and from then on timeouts are four times as long. On rank 0 this waits until
        all have arrived.
        Raises UsageError outside of torchrun, RanksLost if one does not arrive.
        """
        self._self = TorchrunRank(target, device=device)
        self.device = device
        self._backend = ""
        self.rank = self._self.rank
        self.world_size = self._self.world_size
        self._mail = self._self.mail
        self._asked_s = self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._group = 0
        self._tainted = False
        self._broken = ""
        self._closed = False
        self._arenas = itertools.count()
        self._free: list[int] = []
        self._mappings = Mappings()
        self._post = Post(self._mail, self._wait_for)
        self.code = 0
        """The exit code that all ranks are to leave with."""
        self.hosts: Hosts = ()
        """On which hosts the ranks are, as in a case; known on rank 0."""
        self._names: dict[int, str] = {0: ""}
        self._shared = self._self.shares
        if self.rank == 0:
            self.hosts = self._arrivals()
            self._backend = backend_of(device, shared=self._shared, asked=backend)

    def submit(
        self,
        world_size: int,
        payload: bytes | Sequence[bytes],
        *,
        fresh: bool = False,
        hosts: Hosts = (),
        memory: int = 0,
        code: str = "",
    ) -> TorchrunPending:
        """Submit a job on rank 0, as `Pool.submit` does.

        `fresh` means a new process group in the same processes.

        Raises UsageError unless `world_size` and, if they are given, `hosts` are the launcher's.
        """
        if self.rank != 0:
            raise HarnessError("only rank 0 submits; the others serve")
        if world_size != self.world_size or isinstance(world_size, bool):
            raise UsageError(
                f"torchrun started {self.world_size} ranks, so world size {world_size!r} cannot"
                f" run; ask for --world-sizes {self.world_size}"
            )
        if hosts and counts(hosts, world_size) != counts(self.hosts, world_size):
            raise UsageError(
                f"the case is of hosts with {_listed(counts(hosts, world_size))} ranks, torchrun "
                f"started {_listed(counts(self.hosts, world_size))}; --ranks processes simulates "
                "any hosts"
            )
        payloads = [payload] * world_size if isinstance(payload, bytes) else list(payload)
        if len(payloads) != world_size:
            raise UsageError(f"{len(payloads)} payloads for a world size of {world_size}")
        return TorchrunPending(payloads, fresh=fresh)

    def renew(self) -> None:
        """Make a new process group for the next job. The processes stay those of the launcher."""
        self._tainted = True

    def wait(self, pending: TorchrunPending) -> JobResult:
        """Run the job, rank 0's part included, and collect what came of it.

        Raises HarnessError when ranks are lost or the process group cannot be made again.
        """
        if pending._result is None:
            if self._broken or self._closed:
                raise HarnessError(self._broken or "the pool is closed")
            pending._result = self._patiently(pending)
            signals.check()
        return pending._result

    def serve(self) -> int:
        """On all ranks but 0: do jobs until rank 0 closes its pool. Returns its exit code then.

        Raises RanksLost when rank 0 is gone.
        """
        if self.rank == 0:
            raise HarnessError("rank 0 submits and waits; it does not serve")
        code = None
        while code is None:
            code = self._self.serve_one(next(self._numbers))
        self.close()
        return code

    def give_up(self, why: str) -> None:
        """Ranks are lost: close without waiting for them."""
        self._broken = self._broken or why

    def close(self) -> None:
        """On rank 0: let the others return from `serve`. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        if self.rank == 0:
            number = next(self._numbers)
            others = range(1, self.world_size)
            for rank in others:
                self._mail.put(f"order/{number}/{rank}", encode(Order(-1, 0, "", self.code)))
            # The store may live in this process: leave last.
            until = time.monotonic() + (0.0 if self._broken else _GOODBYE_S)
            for rank in others:
                self._mail.wait(f"bye/{rank}", give_up=lambda: time.monotonic() > until)
        self._self.close()

    def __enter__(self) -> TorchrunPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _patiently(self, pending: TorchrunPending) -> JobResult:
        began = time.monotonic()
        result = self._unless_short(pending)
        if result.outcome != "hung" or self._broken or not at_one_place(result.rank_outcomes):
            return result
        before = self._timeout_s
        if before == self._asked_s:
            self._timeout_s = _PATIENT * before
        result.release()
        again = self._unless_short(pending)
        if again.outcome != "hung":
            return again
        return dataclasses.replace(
            again,
            reason=f"{again.reason}, and for {before:.3g} s in the process group before",
            duration_s=time.monotonic() - began,
        )

    def _unless_short(self, pending: TorchrunPending) -> JobResult:
        """Run a job. Raises UsageError if it failed for want of what the machine could not give."""
        before = denied()
        try:
            result = self._run(pending)
            words = shortage_of(result, before)
        except HarnessError as error:
            words = shortage(error) or denied_since(before)
            if words is None:
                raise
            raise UsageError(words) from error
        if words is not None and not is_ample(words, self.world_size):
            self._broken = self._broken or words
            raise UsageError(words)
        return result

    def _run(self, pending: TorchrunPending) -> JobResult:
        number = next(self._numbers)
        if self._tainted or pending._fresh:
            self._group += 1
            self._tainted = False
        arena = self._free.pop() if self._free else next(self._arenas)
        order = Order(
            self._group, arena, machine(), backend=self._backend, timeout_s=self._timeout_s
        )
        for rank in range(1, self.world_size):
            self._mail.put(f"payload/{number}/{rank}", pending._payloads[rank])
            self._mail.put(f"order/{number}/{rank}", encode(order))
        began = time.monotonic()
        reply = self._self.perform(number, order, pending._payloads[0])
        signals.check()
        reports = {0: RankReport(reply, self._self.board.read(0))}
        beats = self._collect(number, reports)
        return self._judge(number, arena, reports, beats, time.monotonic() - began)

    def _arrivals(self) -> Hosts:
        """The hosts of all ranks. Those whose ranks are not next to each other count as one."""
        hosts = [host_number()]
        until = time.monotonic() + _ARRIVAL_S
        waiting = Wait()

        def is_late() -> bool:
            waiting.look()
            return time.monotonic() > until

        for rank in range(1, self.world_size):
            key = f"arrived/{rank}"
            if not self._mail.wait(key, give_up=is_late):
                raise RanksLost(f"rank {rank} did not come within {_ARRIVAL_S:.0f} s")
            arrived = decode_arrived(self._mail.take(key))
            hosts.append(arrived.host)
            self._names[rank] = arrived.name
            self._shared |= arrived.shares
        counts = [(host, len(list(ranks))) for host, ranks in itertools.groupby(hosts)]
        if len({host for host, _ in counts}) < len(counts):
            return ()
        return spelled([count for _, count in counts])

    def _wait_for(self, rank: int, key: str) -> None:
        until = time.monotonic() + self._timeout_s
        if not self._mail.wait(key, give_up=lambda: time.monotonic() > until):
            self._lose([rank], f"no answer for {self._timeout_s:.0f} s")

    def _lose(self, ranks: Sequence[int], why: str) -> NoReturn:
        """Raises RanksLost."""
        names = {self._names[rank] for rank in ranks}
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        self._broken = f"{who} ({', '.join(sorted(names))}) gave {why}, so this run ends here"
        raise RanksLost(self._broken)

    def _collect(self, number: int, reports: dict[int, RankReport]) -> dict[int, Beat | None]:
        """Wait for the other ranks' reports; returns the last beat of those that hang.

        Raises RanksLost where there are no beats.
        """
        heard = dict.fromkeys(range(1, self.world_size), time.monotonic())
        numbers: dict[int, int] = {}
        waiting = set(range(1, self.world_size))
        moved_at = looked_at = time.monotonic()
        beats: dict[int, Beat | None] = {}
        pause = 0.0002
        while waiting:
            for rank in sorted(waiting):
                key = f"report/{number}/{rank}"
                if self._mail.ready(key):
                    reports[rank] = decode_report(self._mail.take(key))
                    waiting.remove(rank)
                    moved_at = time.monotonic()
            now = time.monotonic()
            if now - looked_at > 1.0:
                latest = {rank: read_beat(self._mail, f"beat/{number}/{rank}") for rank in waiting}
                for rank, beat in latest.items():
                    if beat is not None and beat.number != numbers.get(rank):
                        numbers[rank], heard[rank] = beat.number, now
                lost = [rank for rank in sorted(waiting) if now - heard[rank] > _LOST_S]
                if lost:
                    self._lose(lost, f"no sign of life for {_LOST_S:.0f} s")
                if moved(beats, latest, now - moved_at):
                    beats, moved_at = latest, now
                looked_at = now
                # Collectives that cannot end raise at the group's timeout, which is sooner.
                if now - moved_at > self._timeout_s + _SPARE_S:
                    return {rank: latest[rank] for rank in waiting}
            if waiting:
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
        return {}

    def _judge(
        self,
        number: int,
        arena: int,
        reports: dict[int, RankReport],
        beats: dict[int, Beat | None],
        seconds: float,
    ) -> JobResult:
        errors = [r.reply.error for r in reports.values() if r.reply.error is not None]
        for error in errors:
            if error.harness:
                self._broken = f"the process group cannot be made\n{error.traceback}"
                raise HarnessError(self._broken)
        if beats:
            ranks = ", ".join(map(str, sorted(beats)))
            self._broken = (
                f"rank {ranks} did not come back from a job; torchrun's ranks cannot be started"
                " anew one by one, so this run ends here"
            )
        late = any(map(is_timeout, errors)) and all(is_timeout(e) or is_echo(e) for e in errors)
        alike = len(errors) == self.world_size and len({e.type_name for e in errors}) == 1
        given = {rank: report.reply for rank, report in reports.items()}
        self._tainted = bool(errors) and not (alike and not any(map(is_echo, errors)))
        self._tainted |= not fit(given)
        outcomes = tuple(
            rank_outcome(rank, reports.get(rank), beats.get(rank), late=late)
            for rank in range(self.world_size)
        )
        first = first_to_fail(outcomes)
        held = BytesCache()  # of this job alone: arenas are filled again
        views = [
            self._view(number, rank, arena, reports.get(rank), held)
            for rank in range(len(outcomes))
        ]
        replies = [
            reports[rank].reply if rank in reports else None for rank in range(len(outcomes))
        ]
        return JobResult(
            outcome="hung" if beats or late else "crashed" if errors else "finished",
            payloads=tuple(reply.payload if reply else None for reply in replies),
            arenas=tuple(views),
            rank_outcomes=outcomes,
            duration_s=seconds,
            first_failed=None if late else first,
            reason="no sign of progress from some ranks"
            if beats
            else f"collectives waited for {self._timeout_s:.3g} s in vain"
            if late
            else "",
            leaks=leaks_of(given, replaced=False),
            _release=once(lambda: self._released(arena)),
        )

    def _released(self, arena: int) -> None:
        self._mappings.forget_large(arena)
        self._free.append(arena)

    def _view(
        self, number: int, rank: int, arena: int, report: RankReport | None, held: BytesCache
    ) -> ArenaView | None:
        if report is None:
            return None
        if report.mailed:
            return received(self._mail.take(f"arena/{number}/{rank}"))
        if report.used >= 0:
            return RemoteView(self._post, rank, arena, report.used, held)
        reply = report.reply
        view = self._mappings.view(rank, arena, reply.arena_path, reply.arena_bytes)
        return LocalView(view, held)


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))
