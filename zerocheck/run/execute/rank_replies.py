"""Replies of rank processes: decoded, checked for their kind, with a reader of their tensors."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import torch

from ...errors import HarnessError, Unsupported
from ...judge.assemble import Fetch
from ...protocol.observations import RankObservation, Recorded
from ...protocol.replies import CaseUnsupported, Reply
from ...ranks.result import JobResult
from ...ranks.view import Slot

R = TypeVar("R")


def complete(result: JobResult) -> bool:
    """Return True if every rank came to its end and replied."""
    return result.outcome == "finished" and None not in result.payloads


def decode_reply(payload: bytes) -> Reply:
    """Decode the reply of one rank."""
    reply: Reply = msgspec.msgpack.decode(payload, type=Reply)
    return reply


def refusal_of_some_ranks(result: JobResult) -> str:
    """Return why some ranks refused the case while the others wait for them, or an empty text.

    torch refuses what a rank holds: one whose shard is empty has nothing to refuse.
    """
    if result.outcome != "hung":
        return ""
    replies = (decode_reply(payload) for payload in result.payloads if payload is not None)
    return next((one.reason for one in replies if isinstance(one, CaseUnsupported)), "")


def expect(payload: bytes, kind: type[R]) -> R:
    """Decode a reply of this kind.

    Raises Unsupported, with the reason, where the rank does not support the case, and HarnessError
    for another kind.
    """
    reply = decode_reply(payload)
    if isinstance(reply, CaseUnsupported):
        raise Unsupported(reply.reason)
    if not isinstance(reply, kind):
        raise HarnessError(f"a rank replied {type(reply).__name__}, not {kind.__name__}")
    return reply


def received(result: JobResult, kind: type[R]) -> list[R]:
    """Decode the replies of all ranks of a complete result. Raises as `expect`."""
    return [expect(payload, kind) for payload in result.payloads if payload is not None]


def read_observations(result: JobResult) -> tuple[list[RankObservation], Fetch]:
    """Decode the observation of each rank of a complete result, with a reader of its tensors.

    Raises Unsupported, with the reason, where a rank does not support the case.
    """

    def fetch(rank: int, record: Recorded) -> torch.Tensor:
        arena = result.arenas[rank]
        assert arena is not None
        return arena.tensor(Slot(record.offset, record.numel, record.dtype))

    return received(result, RankObservation), fetch
