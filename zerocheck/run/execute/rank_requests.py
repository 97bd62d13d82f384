"""Requests to a rank process before a run, since they run the user's code: no case is run here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from ...case.schema import Case, UserModel, UserOptimizer
from ...errors import UsageError
from ...protocol.jobs import Build, Describe, Job, LookAtModel, LookAtOptimizer, Supports
from ...protocol.replies import Description, ModelLook, OptimizerLook, Refusals
from ...ranks.result import JobResult
from ...user_code import UNDER_MAIN
from .rank_pool import RankPool
from .rank_replies import expect

R = TypeVar("R")
A = TypeVar("A", Description, ModelLook, OptimizerLook)


def look(ranks: RankPool, name: str, *, world_size: int = 1) -> UserModel:
    """Inspect the user's model in a rank process: it runs the user's code.

    Raises UsageError if it cannot be judged.
    """
    found = _answer(ranks, LookAtModel(name), ModelLook, world_size, name).model
    assert found is not None  # or there is an error
    return found


def look_at_optimizer(ranks: RankPool, location: str, *, world_size: int = 1) -> UserOptimizer:
    """Inspect the user's optimizer class in a rank process: it runs the user's code.

    Raises UsageError if it cannot be judged.
    """
    job = LookAtOptimizer(location)
    found = _answer(ranks, job, OptimizerLook, world_size, location).optimizer
    assert found is not None  # or there is an error
    return found


def describe(ranks: RankPool, implementation: str, *, world_size: int = 1) -> Description:
    """Read an implementation's declarations in a rank process: it runs the user's code.

    Raises UsageError if it cannot be loaded.
    """
    job = Describe(implementation)
    return _answer(ranks, job, Description, world_size, implementation)


def check_builds(ranks: RankPool, implementation: str, case: Case) -> None:
    """Build an implementation for a case in its ranks, before anything is judged.

    Raises UsageError for what the implementation gives and zerocheck cannot judge. Whatever else
    goes wrong is for the cases to show.
    """
    job = msgspec.msgpack.encode(Build(implementation, case))
    submitted = ranks.submit(case.world_size, job, hosts=case.hosts, code=implementation)
    result = ranks.wait(submitted)
    result.release()
    for outcome in result.rank_outcomes:
        if outcome.type_name == f"{UsageError.__module__}.{UsageError.__qualname__}":
            raise UsageError(f"{implementation}: {outcome.text.strip()}")


def refusals(
    ranks: RankPool, implementation: str, candidates: Sequence[Case], *, world_size: int = 1
) -> list[str | None]:
    """Return for each candidate the reason why the implementation does not support it, or None.

    A rank process is asked, since it runs the user's code. If that ends the process, nothing counts
    as refused: the cases will show what is wrong.
    """
    if not candidates:
        return []
    job = Supports(implementation, tuple(candidates))
    refused, _ = _reply(ranks, job, Refusals, world_size)
    if refused is None:
        return [None] * len(candidates)
    reasons = (None, *refused.reasons)
    return [reasons[number] for number in refused.of]


def _answer(ranks: RankPool, job: Job, kind: type[A], world_size: int, name: str) -> A:
    """Ask all ranks about code that they import by `name`, and return the reply of rank 0.

    Raises UsageError with the error in the reply, or if there is none.
    """
    reply, result = _reply(ranks, job, kind, world_size)
    if reply is None:
        what = "does not end" if result.outcome == "hung" else "ended the process that tried it"
        rank = result.rank_outcomes[0]
        output = f": {rank.output.strip().splitlines()[-1]}" if rank.output.strip() else ""
        raise UsageError(
            f"loading {name} {what} ({rank.headline()}{output}); if the file is a script, "
            f"{UNDER_MAIN}"
        )
    if reply.error:
        raise UsageError(reply.error)
    return reply


def _reply(ranks: RankPool, job: Job, kind: type[R], world_size: int) -> tuple[R | None, JobResult]:
    """Ask all ranks, and return the reply of rank 0, or None if it gave none, and the result."""
    result = ranks.wait(ranks.submit(world_size, msgspec.msgpack.encode(job)))
    try:
        payload = result.payloads[0]
        return None if payload is None else expect(payload, kind), result
    finally:
        result.release()
