"""Rank processes on this machine: teams by world size, kept while they are sound."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
import weakref
from collections.abc import Iterator, Sequence

from zerocheck.errors import HarnessError, UsageError
from zerocheck.machine import signals
from zerocheck.machine.devices import CPU
from zerocheck.machine.shortage import is_ample, shortage
from zerocheck.ranks import post_mortem
from zerocheck.ranks.cores import Cores
from zerocheck.ranks.in_flight_job import InFlightJob, Pending
from zerocheck.ranks.limits import check_room, check_world_size, has_room, room
from zerocheck.ranks.result import JobResult, fit
from zerocheck.ranks.scratch import SHARED_MEMORY, Scratch
from zerocheck.ranks.spawner import Spawner, shut_down
from zerocheck.ranks.team import Team
from zerocheck.ranks.watchdog import Verdict

_LOOK_S = 0.2
_EARLY_DEATHS = 3
_IDLE, _IDLE_ON_GPU = 32, 8
"""Ranks; each that has started a GPU keeps some hundred MiB of its memory."""
_CEILING_S, _GPU_CEILING_S = 300.0, 60.0
"""Who waits for a GPU that waits for other ranks is busy all the time."""
_AGAIN = 0.1
"""Share of the ceiling for code that has reached it once, and would in every further case."""
_GPU_PATIENCE_S = 30.0
"""Starting a GPU reads libraries from the disk, and waits for the driver."""


class Pool:
    """Runs jobs on teams of freshly forked ranks, one process group each.

    A zygote that has imported everything starts with the pool and forks the ranks. A team is kept
    for the next job of its world size unless that could be tainted: by a death, a hang, an
    exception that not all ranks raised alike, or global state that a job left changed and that
    could not be put back. Not thread-safe. When this process dies, by
    whatever signal, the zygote ends all ranks.
    """

    def __init__(
        self,
        target: str,
        *,
        device: str = CPU,
        backend: str | None = None,
        max_idle_ranks: int | None = None,
        patience_s: float = 10.0,
        ceiling_s: float | None = None,
        grace_s: float = 1.0,
        keep_after_same_exception: bool = True,
        shared_memory: str = SHARED_MEMORY,
        cores: Cores | None = None,
        warm: Sequence[str] = (),
        preparation: bytes = b"",
    ) -> None:
        """`target` is "package.module:function", (payload, RankContext) -> bytes.

        `device`: cpu, cuda (a GPU for each rank where there are enough, else they share them) or
        cuda:N. `backend`: gloo or nccl, None for what fits: see ranks/device.py.
        `patience_s`: no sign of life for that long is a hang. `ceiling_s`: no progress for that
        long is one though processors are busy. `grace_s`: how long the others may be still after
        a rank failed. Teams beyond `max_idle_ranks` ranks in all are closed, the oldest first,
        and those on several hosts before all others.
        `warm`: modules that take long to import, once for all ranks. One that does not import is
        left to whoever needs it. `preparation`: what `prepare` of the target's module gets.
        """
        self._target = target
        self._warm = warm
        self._preparation = preparation
        self.device = device
        self._backend = backend
        on_cpu = device == CPU
        if max_idle_ranks is None:
            max_idle_ranks = _IDLE if on_cpu else _IDLE_ON_GPU
        self._max_idle_ranks = max_idle_ranks
        self._patience_s = patience_s if on_cpu else max(patience_s, _GPU_PATIENCE_S)
        self._ceiling_s = ceiling_s or (_CEILING_S if on_cpu else _GPU_CEILING_S)
        self._grace_s = grace_s
        self._keep_after_same_exception = keep_after_same_exception
        self._cores = Cores() if cores is None else cores
        self._shared_memory = shared_memory
        self._selector = selectors.DefaultSelector()
        self._teams: list[Team] = []
        self._queue: list[InFlightJob] = []
        self._looked_at = 0.0
        self._endless: set[str] = set()
        """Names of code that has reached the ceiling."""
        self._closed = False
        self._lean = False
        """True once the machine lacked something: then there is one team at a time."""
        with signals.deferred():
            self._start_spawner()

    def _start_spawner(self) -> None:
        self._scratch = Scratch(shared_memory=self._shared_memory)
        log = os.path.join(self._scratch.slow, "zygote.log")
        self._spawner = Spawner(
            self._target,
            scratch=self._scratch.directories,
            log=log,
            warm=self._warm,
            preparation=self._preparation,
        )
        # Runs at exit too. A fork of this process must not end what is not its own.
        self._finalizer = weakref.finalize(
            self, shut_down, self._spawner, self._scratch, self._cores, os.getpid()
        )

    def wait_until_ready(self) -> float:
        """Wait for the zygote's imports; returns the seconds they took. Raises HarnessError."""
        return self._spawner.wait_until_ready()

    @property
    def zygote_pid(self) -> int:
        return self._spawner.pid

    @property
    def rank_pids(self) -> dict[int, list[int]]:
        """The pids of the living teams by world size; of several, those of the one on one host."""
        teams = sorted(self._teams, key=lambda team: not team.hosts)
        return {team.world_size: team.pids() for team in teams}

    # The two things that callers do

    def submit(
        self,
        world_size: int,
        payload: bytes | Sequence[bytes],
        *,
        fresh: bool = False,
        hosts: tuple[int, ...] = (),
        memory: int = 0,
        code: str = "",
    ) -> Pending:
        """Send a job, one payload for all ranks or one for each, and do not wait for it.

        Jobs of one world size and the same hosts run in the order of submission. `fresh`: on new
        processes, which end with the job. `hosts`: as in a case; the ranks' environment says so.
        Ranks that have read there on which host they are, as user code may when it is imported,
        are told no other. `memory`: bytes that the ranks are known to need. `code`: name of the
        code under test, whose later jobs have a lower ceiling once one has reached it. Raises
        UsageError for a world size that cannot be.
        """
        if self._closed:
            raise HarnessError("the pool is closed")
        world_size = check_world_size(world_size)
        payloads = [payload] * world_size if isinstance(payload, bytes) else list(payload)
        if len(payloads) != world_size:
            raise UsageError(f"{len(payloads)} payloads for a world size of {world_size}")
        bound = room(world_size, memory) if self.device == CPU else 0
        job = InFlightJob(world_size, payloads, fresh, hosts, bound, code)
        with self._all_or_nothing():
            self._queue.append(job)
            self._turn(0.0)
            self._dispatch()
        return Pending(job)

    def renew(self) -> None:
        """Keep none of the processes that are there now for jobs that are submitted after this."""
        for team in self._teams:
            team.retired = True

    def wait(self, pending: Pending) -> JobResult:
        """The job's result, whatever happened to the ranks.

        Raises HarnessError when zerocheck itself failed; then, and on KeyboardInterrupt, all
        jobs under way are lost and their ranks ended.
        """
        job = pending._job
        with self._all_or_nothing():
            while job.result is None:
                signals.check()
                if job.lost:
                    raise HarnessError(f"this job was lost: {job.lost}")
                self._dispatch()
                if self._queue and not self._cores.held:
                    self._cores.hold()
                    continue
                self._turn(_LOOK_S)
        return job.result

    def close(self) -> None:
        """End all ranks and the zygote, and remove their files. Closing twice is fine."""
        if self._closed:
            return
        with signals.deferred():
            self._closed = True
            self._lose("the pool was closed")
            with contextlib.suppress(OSError):
                self._selector.close()
            for team in self._teams:
                for sock in team.sockets:
                    sock.close()
            self._teams.clear()
            self._finalizer()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Jobs out

    def _dispatch(self) -> None:
        """Send what can be sent, without blocking."""
        if not self._queue or self._must_pass_on():
            return
        if not self._cores.try_hold():
            return
        blocked: set[object] = set()
        for job in list(self._queue):
            if job.kind in blocked:
                continue
            team = self._team_for(job)
            if team is None:
                blocked.add(job.kind)
                continue
            self._queue.remove(job)
            team.send(job)

    def _must_pass_on(self) -> bool:
        """Return True if other runs want the processors and jobs have to drain first."""
        if not self._cores.held or not self._cores.should_pass_on():
            return False
        if any(team.jobs for team in self._teams):
            return True
        self._cores.release(give_way=True)
        return False

    def _team_for(self, job: InFlightJob) -> Team | None:
        """None when the job has to wait, until a broken team is gone or there is room."""
        if self._lean and any(team.jobs for team in self._teams):
            return None
        if job.fresh:
            return self._new_team(job, dedicated=True)
        for team in self._teams:
            if (team.world_size, team.hosts) == job.kind and not team.dedicated:
                if team.accepting:
                    return team
                if team.jobs:
                    return None
                self._end(team)
                return self._new_team(job)
        for team in self._teams:
            if team.world_size == job.world_size and team.movable:
                return team
        return self._new_team(job)

    def _make_room(self, world_size: int) -> bool:
        """End idle teams until there is room for new ranks. False if busy ones have to end first.

        Raises UsageError if there is not enough memory with no other ranks.
        """
        idle = self._idle()
        while self._teams and (self._lean or not has_room(world_size)):
            if not idle:
                return False
            self._end(idle.pop(0))
        check_room(world_size)
        return True

    def _new_team(self, job: InFlightJob, *, dedicated: bool = False) -> Team | None:
        if not self._make_room(job.world_size):
            return None
        if not self._spawner.alive:
            self._restart()
        team = Team(
            job.world_size,
            spawner=self._spawner,
            scratch=self._scratch,
            hosts=job.hosts,
            dedicated=dedicated,
            device=self.device,
            backend=self._backend,
        )
        self._teams.append(team)
        for rank, sock in enumerate(team.sockets):
            self._selector.register(sock, selectors.EVENT_READ, (team, rank))
        return team

    def _restart(self) -> None:
        """The zygote was killed, and its ranks with it."""
        with signals.deferred():
            self._finalizer.detach()
            self._spawner.close()
            self._scratch.remove()
            self._start_spawner()

    # Replies in

    def _turn(self, timeout_s: float) -> None:
        """Take what has come, then see what it means."""
        if any(team.has_unsent for team in self._teams):
            timeout_s = min(timeout_s, 0.001)
            for team in self._teams:
                team.flush()
        teams: list[Team] = []
        for key, _ in self._selector.select(timeout_s):
            team, rank = key.data
            if not team.receive(rank):
                self._selector.unregister(key.fileobj)
            if team not in teams:
                teams.append(team)
        now = time.monotonic()
        # Not in a quick look in passing: hangs are recognized from a series of looks.
        inspect = timeout_s > 0 and now - self._looked_at >= _LOOK_S
        if inspect:
            self._looked_at = now
            self._scratch.check()
        for team in list(self._teams) if inspect else teams:
            self._settle(team, inspect=inspect)
        busy = [team for team in self._teams if team.jobs]
        if self._cores.held and not self._queue and all(team.watchdog.idle for team in busy):
            self._cores.release()

    def _settle(self, team: Team, *, inspect: bool) -> None:
        """Finish the jobs at the head of the team that can be finished."""
        try:
            self._settle_jobs(team, inspect=inspect)
        except (HarnessError, OSError) as error:
            if not team.jobs:
                raise
            words = shortage(error) or post_mortem.denied_since(team.jobs[0].denied)
            if words is None or not self._put_back(team, words):
                raise

    def _put_back(self, team: Team, words: str) -> bool:
        """Run the job at the head of a team again, with no other ranks: something was lacking.

        From then on there is one team at a time. False if that was done before and the room was
        ample. Raises UsageError, with `words`, if it was not.
        """
        head = team.jobs[0]
        if head.repeated:
            team.kill()  # what it took counts as room
            if is_ample(words, head.world_size):
                return False
            raise UsageError(words)
        head.repeated = self._lean = True
        for ended in (team, *(idle for idle in self._idle() if idle is not team)):
            with contextlib.suppress(OSError):  # ranks that could not be forked
                self._end(ended)
        return True

    def _is_short(self, team: Team, result: JobResult) -> bool:
        """Return True if the job at the head lacked something, and was put back."""
        words = post_mortem.shortage_of(result, team.jobs[0].denied)
        return words is not None and self._put_back(team, words)

    def _settle_jobs(self, team: Team, *, inspect: bool) -> None:
        while team.alive and team.jobs:
            head = team.jobs[0]
            if head.complete:
                if head.put_back:
                    team.take_head()
                    self._requeue([head])
                    continue
                result = post_mortem.result_of(team, head)
                if self._is_short(team, result):
                    return
                team.take_head()
                head.result = result
                if not team.alive or team.dedicated or not self._keepable(head):
                    self._end(team)
                team.failing = False
                continue
            if team.gone and team.died_early(head):
                head.early_deaths += 1
                if head.early_deaths > _EARLY_DEATHS:
                    raise HarnessError(
                        f"ranks died {head.early_deaths} times before they began a job;"
                        f" the last output:\n{team.output(min(team.gone))}"
                    )
                self._end(team)
                return
            unfinished = head.unfinished(team.gone)
            failed = bool(team.gone or head.raised)
            if unfinished:
                if failed and not team.failing:
                    team.failing = True
                    team.start_watch()
                if not inspect:
                    return
                verdict = self._look(team, head, unfinished, failed=failed)
                if verdict is None:
                    return
            else:
                verdict = None
            self._scratch.check()
            result = post_mortem.broken(team, head, verdict)
            if self._is_short(team, result):
                return
            head.result = result
            team.take_head()
            self._end(team)
        if team.alive and not team.jobs:
            if team.gone:
                self._end(team)
            else:
                self._close_oldest()

    def _look(
        self, team: Team, head: InFlightJob, unfinished: Sequence[int], *, failed: bool
    ) -> Verdict | None:
        """Return what the watchdog says of the ranks that have not finished the job at the head."""
        verdict = team.watchdog.look(
            unfinished,
            team.pids(),
            patience_s=self._grace_s if failed else self._patience_s,
            ceiling_s=self._ceiling_s * (_AGAIN if head.code in self._endless else 1.0),
        )
        if verdict == "ceiling" and head.code:
            self._endless.add(head.code)
        return verdict

    def _keepable(self, job: InFlightJob) -> bool:
        """Return True if the ranks may do another job."""
        if not fit(job.replies):
            return False
        raised = [reply.error for reply in job.raised if reply.error is not None]
        if not raised:
            return True
        assert job.result is not None
        return (
            self._keep_after_same_exception
            and len(raised) == job.world_size
            and len({error.type_name for error in raised}) == 1
            and not any(outcome.echo for outcome in job.result.rank_outcomes)
        )

    def _idle(self) -> list[Team]:
        """Idle teams, those first that are the least likely to be needed again."""
        # Hosts differ from case to case, so that few teams on several are asked for again.
        return sorted(
            (team for team in self._teams if not team.jobs),
            key=lambda team: (not team.hosts, team.used_at),
        )

    def _close_oldest(self) -> None:
        idle = self._idle()
        while len(idle) > 1 and sum(t.world_size for t in idle) > self._max_idle_ranks:
            self._end(idle.pop(0))

    def _end(self, team: Team) -> None:
        """Kill the team; the jobs that it still has go to the next one."""
        self._teams.remove(team)
        for sock in team.sockets:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sock)
        self._requeue(list(team.jobs))
        team.jobs.clear()
        team.kill()

    def _requeue(self, jobs: Sequence[InFlightJob]) -> None:
        self._queue[:0] = jobs

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """An interrupt may strike between any two lines: then nothing is left half done."""
        try:
            yield
        except BaseException as error:
            self._lose(f"{type(error).__name__}: {error}")
            for team in list(self._teams):
                with contextlib.suppress(HarnessError, OSError):
                    self._end(team)
            self._teams.clear()
            self._queue.clear()
            self._cores.release()
            raise

    def _lose(self, why: str) -> None:
        """No job will have a result any more."""
        for job in self._queue + [f for team in self._teams for f in team.jobs]:
            job.lost = job.lost or why
