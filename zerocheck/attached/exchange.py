"""One checked step of a live run: each rank judges its own, rank 0 what they tell."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from ..contract.semantics import Semantics
from ..errors import HarnessError, UsageError
from ..judge.verdict import Judgement, Status
from .full import Full, judge_gradient
from .own import judge_own
from .ranks import Ranks
from .reference import Factory
from .seen import Fetch, Observed, Told
from .together import judge_together

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16,
                                           torch.float64)}  # fmt: skip


class _Wish(msgspec.Struct, frozen=True):
    """What rank 0 wants next: a tensor of a rank, or nothing more (rank -1)."""

    rank: int
    what: str = ""
    number: int = 0


def judge_step(
    observed: Observed | Exception,
    ranks: Ranks,
    *,
    reference: Factory | None = None,
    semantics: Semantics | None = None,
) -> Judgement:
    """The verdict on a step, on every rank. Every rank calls this.

    reference: makes the model that is not wrapped, for the gradient. Where a rank could not observe
    the step, or rank 0 not judge it, all ranks raise what it says: UsageError or HarnessError.
    """
    semantics = semantics or Semantics()
    gathered = ranks.gather(_own(observed))
    replies = [msgspec.msgpack.decode(one, type=_Reply) for one in gathered]
    bad = next((one for one in replies if one.told is None), _Reply())
    started = msgspec.msgpack.decode(ranks.broadcast(msgspec.msgpack.encode(bad)), type=_Reply)
    if started.wrong_usage or started.failed:
        return _verdict(started)
    assert isinstance(observed, Observed)
    told = [one.told for one in replies if one.told is not None]
    full = Full()
    if reference is not None:
        full = judge_gradient(observed, told, reference, semantics, ranks)
    if ranks.rank:
        _serve(observed, ranks)
        return _verdict(msgspec.msgpack.decode(ranks.broadcast(b""), type=_Reply))

    def fetch(rank: int, what: str, number: int) -> torch.Tensor | None:
        wish = _Wish(rank, what, number)
        ranks.broadcast(msgspec.msgpack.encode(wish))
        return _decoded(ranks.gather(_encoded(observed, wish, ranks.rank))[rank])

    verdict = _judged(told, fetch, full if reference is not None else None)
    ranks.broadcast(msgspec.msgpack.encode(_Wish(-1)))
    ranks.broadcast(msgspec.msgpack.encode(verdict))
    return _verdict(verdict)


class _Reply(msgspec.Struct, frozen=True):
    """A rank's share of a step, or a verdict: or the reason why there is none."""

    told: Told | None = None
    judgement: Judgement | None = None
    wrong_usage: str = ""
    failed: str = ""


def _own(observed: Observed | Exception) -> bytes:
    try:
        if isinstance(observed, Exception):
            raise observed
        reply = _Reply(told=judge_own(observed))
    except UsageError as error:
        reply = _Reply(wrong_usage=str(error))
    except Exception as error:
        reply = _Reply(failed=f"{type(error).__name__}: {error}")
    return msgspec.msgpack.encode(reply)


def _judged(told: Sequence[Told], fetch: Fetch, full: Full | None) -> _Reply:
    try:
        return _Reply(judgement=with_gradient(judge_together(told, fetch), full))
    except Exception as error:
        return _Reply(failed=f"{type(error).__name__}: {error}")


def with_gradient(judgement: Judgement, full: Full | None) -> Judgement:
    """The judgement, with the verdict on the gradient, or the reason why there is none."""
    if full is None:
        return judgement
    if full.reason:
        return msgspec.structs.replace(judgement, unjudged={"gradient": full.reason})
    others = [one for one in judgement.violations if one.obligation != "gradient"]
    copies = [one for one in judgement.violations if one.obligation == "gradient"]
    found = [full.violation] if full.violation is not None else copies
    status: Status = "violated" if found else "holds"
    return msgspec.structs.replace(
        judgement,
        statuses={**judgement.statuses, "gradient": status},
        share={**judgement.share, "gradient": full.share},
        violations=(*others, *found),
        tier="full",
        estimated=("gradient",),
    )


def _verdict(reply: _Reply) -> Judgement:
    if reply.wrong_usage:
        raise UsageError(reply.wrong_usage)
    if reply.judgement is None:
        raise HarnessError(f"a checked step could not be judged: {reply.failed}")
    return reply.judgement


def _serve(observed: Observed, ranks: Ranks) -> None:
    """Give rank 0 the tensors that it asks for, until it has enough."""
    while True:
        wish = msgspec.msgpack.decode(ranks.broadcast(b""), type=_Wish)
        if wish.rank < 0:
            return
        ranks.gather(_encoded(observed, wish, ranks.rank))


def _encoded(observed: Observed, wish: _Wish, rank: int) -> bytes:
    value = observed.values.get((wish.what, wish.number)) if rank == wish.rank else None
    if value is None:
        return b""
    return str(value.dtype).encode().ljust(32) + value.view(torch.uint8).numpy().tobytes()


def _decoded(data: bytes) -> torch.Tensor | None:
    if not data:
        return None
    dtype = _DTYPES[data[:32].decode().strip()]
    return torch.frombuffer(bytearray(data[32:]), dtype=torch.uint8).view(dtype)
