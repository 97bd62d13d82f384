"""Conversion of the replies of a team, or their absence, to a JobResult."""

from __future__ import annotations

import time

import msgspec

from zerocheck.errors import HarnessError, UsageError
from zerocheck.machine.shortage import MEMORY, PROCESSES, shortage_in
from zerocheck.ranks.failures import is_echo, is_usage_error
from zerocheck.ranks.in_flight_job import InFlightJob, denied
from zerocheck.ranks.messages import Exit, Leak, Raised, Reply
from zerocheck.ranks.progress import RankPosition
from zerocheck.ranks.result import (
    JobResult,
    RankOutcome,
    State,
    first_to_fail,
    leaks_of,
    once,
    signal_name,
)
from zerocheck.ranks.team import Team
from zerocheck.ranks.view import ArenaView
from zerocheck.ranks.watchdog import Verdict


def result_of(team: Team, job: InFlightJob) -> JobResult:
    """All ranks replied: the job finished, or raised on some of them."""
    return _result(team, job, reason="", exits={}, stacks={})


def broken(team: Team, job: InFlightJob, verdict: Verdict | None) -> JobResult:
    """Some ranks died, hang, or both. Asks the living for their stacks."""
    if verdict is not None:
        team.look_for_the_dead(job.unfinished(team.gone))
    stacks = team.stacks(job.unfinished(team.gone))
    exits = team.exits()
    hung = verdict is not None and not exits and not job.raised
    reason = ""
    if hung:
        reason = (
            "no rank made progress or used a processor"
            if verdict == "quiet"
            else "ranks kept their processors busy, but none made progress"
        )
        for rank in sorted(team.watchdog.stopped):
            reason += f"; rank {rank} is stopped, by SIGSTOP or another signal that stops"
    elif team.orphaned:
        reason = "the process that starts ranks was killed, and its ranks with it"
    elif team.garbled:
        who = ", ".join(map(str, sorted(team.garbled)))
        reason = f"rank {who} wrote to the socket of zerocheck's own messages, and was ended"
    return _result(team, job, reason=reason, exits=exits, stacks=stacks)


def shortage_of(result: JobResult, before: tuple[int, ...]) -> str | None:
    """Name what the machine lacked for a job that did not finish; None if nothing.

    A rank says it in its exception, or in its output before it died; or a control group has
    denied something since `before`.
    """
    if result.outcome == "finished":
        return None
    for rank in result.rank_outcomes:
        text = f"{rank.type_name}: {rank.text}" if rank.state == "raised" else ""
        words = shortage_in(text or (rank.output if rank.state == "killed" else ""))
        if words:
            return words
    return denied_since(before)


def denied_since(before: tuple[int, ...]) -> str | None:
    """Name what control groups have denied since `before`; None if nothing, or if that is empty."""
    if not before:
        return None
    processes, kills = (now - then for now, then in zip(denied(), before, strict=True))
    return MEMORY if kills > 0 else PROCESSES if processes > 0 else None


def _result(
    team: Team, job: InFlightJob, *, reason: str, exits: dict[int, Exit], stacks: dict[int, str]
) -> JobResult:
    arenas = _arenas(team, job)
    replies = job.replies
    for reply in replies.values():
        if reply.error is not None and reply.error.harness:
            if is_usage_error(reply.error):
                raise UsageError(reply.error.text)
            text = reply.error.traceback or reply.error.text
            raise HarnessError(f"a rank could not join its process group\n{text}")
    began = min((reply.began for reply in replies.values()), default=job.sent_at)
    bad = not job.complete or bool(job.raised)
    outcomes = tuple(
        _rank_outcome(
            team, rank, replies.get(rank), exits.get(rank), stacks.get(rank), began, bad=bad
        )
        for rank in range(job.world_size)
    )
    ends = [reply.ended for reply in replies.values()]
    ended = max(ends) if job.complete else time.monotonic()
    first = first_to_fail(outcomes)
    arena = job.arena
    return JobResult(
        outcome="finished" if not bad else "crashed" if first is not None else "hung",
        payloads=tuple(
            replies[rank].payload if rank in replies else None for rank in range(job.world_size)
        ),
        arenas=arenas,
        rank_outcomes=outcomes,
        duration_s=max(0.0, ended - began),
        first_failed=first,
        reason=reason,
        leaks=leaks_of(replies),
        team=team.number,
        _release=once(lambda: team.free(arena)),
    )


def _arenas(team: Team, job: InFlightJob) -> tuple[ArenaView | None, ...]:
    """Open the arena of each rank. One whose file is gone counts as raised, and is not used any
    more: the user's code removed it."""
    views: list[ArenaView | None] = []
    for rank in range(job.world_size):
        try:
            views.append(team.view(rank, job))
        except OSError as error:
            views.append(None)
            text = f"what it held cannot be read, since zerocheck's file was removed: {error}"
            reply = job.replies[rank]
            job.replies[rank] = msgspec.structs.replace(
                reply,
                payload=None,
                error=reply.error or Raised(type(error).__name__, text, ""),
                leaks=[*reply.leaks, Leak("left files of zerocheck removed", undone=False)],
            )
    return tuple(views)


def _rank_outcome(
    team: Team,
    rank: int,
    reply: Reply | None,
    end: Exit | None,
    stack: str | None,
    began: float,
    *,
    bad: bool,
) -> RankOutcome:
    standing: RankPosition = team.board.read(rank)
    state: State
    error = reply.error if reply is not None else None
    if reply is not None:
        state = "finished" if error is None else "raised"
    elif end is not None:
        state = "killed"
    else:
        state = "running" if rank in team.watchdog.awake else "waiting"
    at = reply.ended if reply is not None else end.at if end is not None else None
    lost = reply is None and end is not None
    disconnected = bool(lost and end and end.ended) and rank not in team.garbled
    return RankOutcome(
        rank=rank,
        state=state,
        at_s=None if at is None else at - began,
        type_name=error.type_name if error else "",
        text=error.text if error else "",
        traceback=error.traceback if error else "",
        echo=error is not None and is_echo(error),
        signal_name=signal_name(end.code) if lost and end and not disconnected else "",
        exit_code=end.code if lost and end and end.code >= 0 else None,
        disconnected=disconnected,
        where=standing.where,
        collective=standing.collective,
        collective_sequence=standing.collective_sequence,
        recent=standing.recent,
        stack=stack or "",
        output=team.output(rank) if bad else "",
    )
