"""Requests to a rank process before a run, since they run the user's code: no case is run here."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..case.schema import Case, UserModel
from ..errors import UsageError
from ..protocol.jobs import Job
from ..protocol.replies import Description, ModelLook, Refusals
from .trial import RankPool


def look(ranks: RankPool, name: str, *, world_size: int = 1) -> UserModel:
    """Inspect the user's model in a rank process: it runs the user's code.

    Raises UsageError if it cannot be judged.
    """
    result = ranks.wait(ranks.submit(world_size, msgspec.msgpack.encode(Job(look=name))))
    try:
        payload = result.payloads[0]
        if payload is None:
            raise UsageError(
                f"a look at {name} ended the process that tried it: {result.summary(stacks=True)}"
            )
        looked = msgspec.msgpack.decode(payload, type=ModelLook)
    finally:
        result.release()
    if looked.model is None:
        raise UsageError(looked.error)
    return looked.model


def describe(ranks: RankPool, implementation: str, *, world_size: int = 1) -> Description:
    """Read an implementation's declarations in a rank process: it runs the user's code.

    Raises UsageError if it cannot be loaded.
    """
    job = msgspec.msgpack.encode(Job(implementation=implementation))
    result = ranks.wait(ranks.submit(world_size, job))
    try:
        payload = result.payloads[0]
        if payload is None:
            raise UsageError(
                f"loading {implementation} ended the process that tried it: "
                f"{result.summary(stacks=True)}"
            )
        described = msgspec.msgpack.decode(payload, type=Description)
    finally:
        result.release()
    if described.error:
        raise UsageError(described.error)
    return described


def check_builds(ranks: RankPool, implementation: str, case: Case) -> None:
    """Build an implementation for a case in its ranks, before anything is judged.

    Raises UsageError for what the implementation gives and zerocheck cannot judge. Whatever else
    goes wrong is for the cases to show.
    """
    job = Job(implementation=implementation, case=case, build=True)
    pending = ranks.submit(case.world_size, msgspec.msgpack.encode(job), hosts=case.hosts)
    result = ranks.wait(pending)
    result.release()
    for stood in result.stood:
        if stood.type_name == f"{UsageError.__module__}.{UsageError.__qualname__}":
            raise UsageError(f"{implementation}: {stood.text.strip()}")


def refusals(
    ranks: RankPool, implementation: str, candidates: Sequence[Case], *, world_size: int = 1
) -> list[str | None]:
    """Return for each candidate the reason why the implementation does not support it, or None.

    A rank process is asked, since it runs the user's code. If that ends the process, nothing counts
    as refused: the cases will show what is wrong.
    """
    job = Job(implementation=implementation, candidates=tuple(candidates))
    result = ranks.wait(ranks.submit(world_size, msgspec.msgpack.encode(job)))
    try:
        payload = result.payloads[0]
        if payload is None or not candidates:
            return [None] * len(candidates)
        refused = msgspec.msgpack.decode(payload, type=Refusals)
    finally:
        result.release()
    reasons = (None, *refused.reasons)
    return [reasons[number] for number in refused.of]
