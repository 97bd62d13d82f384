"""Judgement of one checked step: each rank judges its own shards, rank 0 the reports of all."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch

from ... import causes as bugs
from ...contract.semantics import Semantics
from ...protocol.verdicts import Judgement, Obligation, Status
from ..checks.copies import different_copies
from ..checks.cross_rank_checks import judge_all_ranks
from ..checks.joint_context import JointContext
from ..checks.rank_checks import judge_rank
from ..record.ranks import AllRanks
from ..record.step_record import BEFORE, Observed, RankVerdict
from .full_gradient import Full, judge_gradient
from .reference import Factory

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16,
                                           torch.float64)}  # fmt: skip


WEAK = frozenset((bugs.OTHER_OUTPUTS, bugs.EXCHANGE_WITHOUT_ITS_GRADIENT))
"""Causes that say where something is wrong, and not what: that of ranks which differ says more."""

PARTED = "copies of parameters differed before the step"


class _Wish(msgspec.Struct, frozen=True):
    """Request of rank 0 for a tensor of a rank, or the end of its requests (rank -1)."""

    rank: int
    what: str = ""
    number: int = 0


class Verdict(msgspec.Struct, frozen=True):
    """The judgement of a step.

    updated: the optimizer took a step on every rank; alike: several ranks all computed with the
    same samples, where the gradient was judged.
    """

    judgement: Judgement
    updated: bool = True
    alike: bool = False


def judge_step(
    observed: Observed,
    ranks: AllRanks,
    *,
    reference: Factory | None = None,
    semantics: Semantics | None = None,
) -> Verdict:
    """Judge a step, with the same verdict on every rank. Every rank calls this, in `attempt`.

    reference: makes the model that is not wrapped, for the gradient.
    """
    gathered = ranks.gather(msgspec.msgpack.encode(judge_rank(observed)))
    verdicts = (
        [msgspec.msgpack.decode(one, type=RankVerdict) for one in gathered]
        if not ranks.rank
        else []
    )
    full = None
    if reference is not None:
        full = judge_gradient(observed, verdicts, reference, semantics or Semantics(), ranks)
    if ranks.rank:
        _serve(observed, ranks)
        return msgspec.msgpack.decode(ranks.broadcast(b""), type=Verdict)

    def fetch(rank: int, what: str, number: int) -> torch.Tensor | None:
        wish = _Wish(rank, what, number)
        ranks.broadcast(msgspec.msgpack.encode(wish))
        return _decoded(ranks.gather(_encoded(observed, wish, ranks.rank))[rank])

    context = JointContext(verdicts, fetch)
    judgement = with_gradient(judge_all_ranks(context), full, context)
    updated = all(one.summary.ran for one in verdicts)
    every = [one.samples for one in verdicts if not one.summary.stage]
    alike = len(every) > 1 and len({*every}) == 1 and "" not in every
    verdict = Verdict(judgement, updated, alike and judgement.tier == "full")
    ranks.broadcast(msgspec.msgpack.encode(_Wish(-1)))
    ranks.broadcast(msgspec.msgpack.encode(verdict))
    return verdict


def with_norms(observed: Observed, ranks: AllRanks) -> Observed:
    """Reduce the norms that were reported as sharded tensors. Every rank calls this."""
    counts = ranks.gather(str(len(observed.norms)).encode())
    same = ranks.broadcast(b"1" if len(set(counts)) == 1 else b"0") == b"1"
    clips = list(observed.summary.clips)
    for number, norm in observed.norms.items():
        value = float(norm.full_tensor() if same else norm.to_local())
        clips[number] = msgspec.structs.replace(clips[number], norm=value)
    summary = msgspec.structs.replace(observed.summary, clips=tuple(clips))
    return replace(observed, summary=summary, norms={})


def with_gradient(judgement: Judgement, full: Full | None, context: JointContext) -> Judgement:
    """Add to the judgement the verdict on the gradient, or the reason why there is none."""
    if full is None:
        return judgement
    weak = full.violation is not None and WEAK.issuperset(full.violation.causes)
    if weak and any(different_copies(context, f"{BEFORE}.parameter")):
        full = Full(reason=PARTED)
    if full.reason:
        if judgement.statuses.get("gradient") == "violated":
            return judgement
        unjudged = {"gradient": full.reason, **judgement.unjudged}
        return msgspec.structs.replace(judgement, unjudged=unjudged)
    others = [one for one in judgement.violations if one.obligation != "gradient"]
    copies = [one for one in judgement.violations if one.obligation == "gradient"]
    found = copies if full.violation is None else [full.violation]
    if weak:
        found = [one for one in copies if one.causes] or found
    status: Status = "violated" if found else "holds"
    reasons: dict[Obligation, str] = {"gradient": full.changes, "loss": full.loss_reason}
    unjudged = {obligation: reason for obligation, reason in reasons.items() if reason}
    loss: dict[Obligation, Status] = {}
    if full.loss_status is not None:
        loss["loss"] = full.loss_status
    return msgspec.structs.replace(
        judgement,
        statuses={**judgement.statuses, **loss, "gradient": status},
        share={**judgement.share, "gradient": full.share},
        violations=(*others, *found, *([] if full.loss is None else [full.loss])),
        unjudged=judgement.unjudged | unjudged,
        tier="full",
        estimated=("gradient",),
    )


def _serve(observed: Observed, ranks: AllRanks) -> None:
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
