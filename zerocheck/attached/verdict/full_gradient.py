"""Check of the gradient over the ranks of a live run, with one reference model on each.

Parameters are sent to the reference, local gradients are summed, and causes are sought. Every rank
makes the same calls in the same order. Where one has an error, all leave the next of them (see
ranks.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace

import msgspec
import torch

from ... import causes as bugs
from ...contract.semantics import Semantics
from ...errors import UsageError
from ...protocol.observations import Entry
from ...protocol.verdicts import Status, Violation
from ..checks.published_copies import parted_before
from ..checks.script_changes import ScriptChanges
from ..record.axes import no_collectives
from ..record.forwards import Forward
from ..record.ranks import AllRanks, agreed, place_of
from ..record.ranks_own import own_of_ranks
from ..record.run_parameters import RunParameter, run_parameters
from ..record.step_record import ACCUMULATED, GIVEN, Observed, Point, RankVerdict, StepSummary
from .gradient_scale import added, scaled
from .reduced_gradient import (
    NO_FACTOR,
    Exhibit,
    Judged,
    ScriptFactor,
    compare_shards,
    exhibit,
    faults,
    first_right,
    multiplied,
    put,
    script_factor,
    share_of,
    total_of,
    violation,
    worst,
)
from .reference import Factory, Local, Reference
from .tied import by_value, declared, not_summed
from .token_weights import TokenWeights, judge_weights


class _Plan(msgspec.Struct, frozen=True):
    """First message of rank 0.

    entries: of each tensor by rank, none where every rank holds all of it; reason: why no gradient
    is judged; hooks: whether a rank has hooks of the script that change something; points: at
    which the gradient is judged.
    """

    tensors: tuple[RunParameter, ...] = ()
    entries: tuple[tuple[tuple[Entry, ...], ...], ...] = ()
    reason: str = ""
    hooks: bool = False
    points: tuple[Point, ...] = (GIVEN,)


class Full(msgspec.Struct, frozen=True):
    """The verdict on the gradient; rank 0 has it.

    reason: why there is none; changes: what the script did to the gradient after it was judged;
    loss, loss_status, loss_reason: that on the weights of tokens, None and "" where they are not
    declared alike; factor: by which a script that reduces gradients itself multiplies all of them.
    """

    share: float = 0.0
    violation: Violation | None = None
    reason: str = ""
    changes: str = ""
    loss: Violation | None = None
    loss_status: Status | None = None
    loss_reason: str = ""
    factor: float = 1.0


SEEDED_APART = "ranks of tensor parallelism draw other random numbers"
BACKWARD = (
    "the outputs of the model are those of reference=, so that its forward is right, and its "
    "backward is not"
)
IN_STAGES = "the weights of tokens, in the last stage of a pipeline"
UNEQUAL = "ranks multiply their gradients by different factors"


def judge_gradient(
    observed: Observed,
    verdicts: Sequence[RankVerdict],
    factory: Factory,
    semantics: Semantics,
    ranks: AllRanks,
) -> Full:
    """Judge the gradient, with the verdict on rank 0 and an empty one on others.

    verdicts: of all ranks, on rank 0.
    """
    plan = _Plan()
    changes = ScriptChanges.of(verdicts)
    if ranks.rank == 0:
        summaries = [one.summary for one in verdicts]
        reason = why_not(summaries)
        if not reason and parted_before(verdicts):
            reason = "the parameters were not the masters when the step began"
        own = own_of_ranks(summaries, [one.hashes for one in verdicts])
        plan = _Plan(reason=reason) if reason else _planned(summaries, own)
        plan = msgspec.structs.replace(
            plan, hooks=any(one.summary.hooks for one in verdicts), points=changes.points(semantics)
        )
    plan = agreed(plan, _Plan, ranks)
    if plan.reason:
        return Full(reason=plan.reason)
    tensors = [RunParameter(*one) for one in plan.tensors]

    with _of_reference():
        reference = Reference(factory, torch.device(observed.device), observed.model)
        mine = [one for one in tensors if one.stage == observed.summary.stage]
        if observed.summary.stages > 1 and observed.model is not None:
            reference.keep(observed.model)
        reference.check({one.name: tuple(one.shape) for one in mine})
    if plan.hooks and (reason := _of_any_rank(reference.lacks(observed.summary.hooks), ranks)):
        return Full(reason=reason)
    for tensor, entries in zip(tensors, plan.entries, strict=True):
        whole = _whole(observed, tensor, entries, ranks)
        if tensor in mine:
            reference.load(tensor.name, whole, tensor.torch_dtype, trains=tensor.trains)
    local = _local(observed, reference, semantics)
    if reason := _of_any_rank(local.reason, ranks):
        return Full(reason=reason)
    tied = declared(reference.tied, tensors, ranks) if observed.summary.stages > 1 else {}
    found = _judged(observed, local, plan.points, tensors, semantics, ranks, tied=tied)
    if observed.summary.stages > 1 and not tied:
        tied = by_value(found[GIVEN], tensors, verdicts, ranks)
        if tied:
            again = _judged(observed, local, plan.points, tensors, semantics, ranks, tied=tied)
            apart = "" if tied.keys().isdisjoint(again[GIVEN].wrong) else "apart"
            if _of_any_rank(apart, ranks):  # of equal values by accident
                tied = {}
            else:
                found = again
    full, point = _verdict(observed, local, found, tensors, semantics, ranks, tied)
    if observed.summary.samples_on >= 0:
        full = _reordered(full, observed, reference, tensors, semantics, ranks)
    full = _with_outputs(full, local, observed, tensors, ranks)
    every: list[list[TokenWeights]] = []
    if semantics.weight == "token":
        gathered = ranks.gather(msgspec.msgpack.encode(local.tokens))
        every = [msgspec.msgpack.decode(one, type=list[TokenWeights]) for one in gathered]
    if ranks.rank:
        return full
    return with_weights(
        full, observed.summary, every, semantics, changes if point == ACCUMULATED else None
    )


def _local(observed: Observed, reference: Reference, semantics: Semantics) -> Local:
    alone = no_collectives() if observed.summary.samples_on >= 0 else nullcontext()
    with _of_reference(), alone:
        return reference.local(
            observed.forwards,
            observed.buffers,
            tokens=semantics.weight == "token",
            casts=observed.summary.casts,
        )


def _judged(
    observed: Observed,
    local: Local,
    points: Sequence[Point],
    tensors: Sequence[RunParameter],
    semantics: Semantics,
    ranks: AllRanks,
    factor: ScriptFactor = NO_FACTOR,
    tied: Mapping[str, Sequence[str]] = {},
) -> dict[Point, Judged]:
    """Judge all tensors. tied: names of those whose gradients are one, by each of them."""
    found = {point: Judged(0.0, {}, (), ()) for point in points}
    by_name = {one.name: one for one in tensors}
    for tensor in tensors:
        if tensor.trains:
            names = tied.get(tensor.name, (tensor.name,))
            total = total_of([ranks.total(share_of(local, by_name[name])) for name in names])
            for point, judged in found.items():
                one = compare_shards(observed, tensor, total, semantics, point, factor)
                found[point] = joined(judged, one)
    return found


def _with_outputs(
    full: Full, local: Local, observed: Observed, tensors: Sequence[RunParameter], ranks: AllRanks
) -> Full:
    """Return the verdict, and where the outputs say that the forward, or the backward, is wrong."""
    unlike = _of_any_rank(local.unlike or "", ranks)
    compared = _of_any_rank("" if local.unlike is None else "1", ranks)
    violation = full.violation
    if violation is None or violation.causes not in ((), (bugs.GRADIENT_MISSING,)):
        return full
    some = len(violation.tensors) < sum(one.trains for one in tensors)
    if observed.seeded_apart:
        text, cause = SEEDED_APART, bugs.TENSOR_PARALLEL_RANKS_SEEDED_APART
    elif unlike:
        text = f"already {unlike}: the forward computes with other parameters, or reference= makes "
        text, cause = f"{text}another model", bugs.OTHER_OUTPUTS
    elif compared and some and len(observed.summary.axes) > (observed.summary.stages > 1):
        text, cause = BACKWARD, bugs.EXCHANGE_WITHOUT_ITS_GRADIENT
    else:
        return full
    causes = violation.causes or (cause,)
    text = f"{violation.explanation}; {text}"
    violation = msgspec.structs.replace(violation, explanation=text, causes=causes)
    return msgspec.structs.replace(full, violation=violation)


def _reordered(
    full: Full,
    observed: Observed,
    reference: Reference,
    tensors: Sequence[RunParameter],
    semantics: Semantics,
    ranks: AllRanks,
) -> Full:
    """Return the verdict, with the cause where the parts of sequences are in another order."""
    unexplained = full.violation is not None and not full.violation.causes
    if not ranks.broadcast(b"1" if unexplained else b""):
        return full
    forwards: list[Forward] = []
    if observed.reordered is not None:
        with suppress(UsageError):  # an odd number of positions has no halves
            forwards = observed.reordered()
    local = _local(replace(observed, forwards=forwards), reference, semantics)
    found = _judged(observed, local, (GIVEN,), tensors, semantics, ranks)[GIVEN]
    every = ranks.gather(b"" if found.wrong or found.missing or found.needless else b"1")
    if full.violation is None or not all(every):
        return full
    text = f"{full.violation.explanation}; it is that of sequences whose parts are put together in "
    text += 'another order: declare it with zerocheck.SequenceAxis(order="zigzag"), or no longer'
    cause = (bugs.PARTS_IN_ANOTHER_ORDER,)
    violation = msgspec.structs.replace(full.violation, explanation=text, causes=cause)
    return msgspec.structs.replace(full, violation=violation)


def _of_any_rank(reason: str, ranks: AllRanks) -> str:
    """Return the reason of the first rank that has one, on all ranks."""
    every = ranks.gather(reason.encode())
    return ranks.broadcast(next(filter(None, every), b"")).decode()


def with_weights(
    full: Full,
    summary: StepSummary,
    every: Sequence[Sequence[TokenWeights]],
    semantics: Semantics,
    changes: ScriptChanges | None,
) -> Full:
    """Return the verdict with what the script did after the reduction, and on weights of tokens.

    every: of each rank's microbatches; changes: None where what the optimizer was given was judged.
    """
    factor = full.factor
    if changes is not None:
        factor, unequal = changes.factor, changes.unequal()
        violation, words = full.violation or unequal, changes.text(semantics)
        if unequal is not None:  # then no token has one weight on all ranks
            return msgspec.structs.replace(full, violation=violation, loss_reason=UNEQUAL)
        full = msgspec.structs.replace(full, violation=violation, changes=words)
    if semantics.weight != "token":
        return full
    if summary.stages > 1:
        return msgspec.structs.replace(full, loss_reason=IN_STAGES)
    averaged = semantics.reduction == "mean"
    loss, reason = judge_weights(
        every,
        step=summary.number,
        scale=summary.loss_scale,
        world_size=len(every) if averaged else summary.alike,
        factor=factor,
    )
    status: Status = "violated" if loss is not None else "holds"
    return msgspec.structs.replace(
        full, loss=loss, loss_reason=reason, loss_status=None if reason else status
    )


def why_not(summary: Sequence[object]) -> str:
    """Return the reason why no gradient is judged in this step, or an empty text."""
    for one in summary:
        unjudged: str = getattr(one, "unjudged", "")
        if unjudged:
            return unjudged
    return ""


def joined(one: Judged, other: Judged) -> Judged:
    """Merge the judgements of a rank on two tensors."""
    return Judged(
        max(one.share, other.share),
        {**one.wrong, **other.wrong},
        one.missing + other.missing,
        one.needless + other.needless,
        {**one.scales, **other.scales},
        added(one.along, other.along),
    )


@contextmanager
def _of_reference() -> Iterator[None]:
    """Report errors of the model of `reference=` as errors of the user's code."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the model of reference= raised {type(error).__name__}: {error} ({place_of(error)}); "
            "it must take the inputs of the model that was attached, and return its outputs"
        ) from error


def _planned(ranks: Sequence[StepSummary], own: Collection[str]) -> _Plan:
    """Return the plan. own: names of what differs between ranks by design, and is not judged."""
    every = run_parameters(ranks)
    tensors = [one._replace(trains=one.trains and one.name not in own) for one in every]
    entries: dict[str, list[list[Entry]]] = {one.name: [[] for _ in ranks] for one in tensors}
    for rank, summary in enumerate(ranks):
        for piece in summary.pieces:
            entries[piece.name][rank].append(piece.entry)
    return _Plan(
        tuple(tensors),
        tuple(() if one.whole else tuple(map(tuple, entries[one.name])) for one in tensors),
    )


def _whole(
    observed: Observed, tensor: RunParameter, entries: Sequence[Sequence[Entry]], ranks: AllRanks
) -> torch.Tensor:
    """Return a parameter before the step, flat: this rank's own copy, or put together from all."""
    parts = [
        observed.values["before.parameter", number]
        for number, piece in enumerate(observed.summary.pieces)
        if piece.name == tensor.name
    ]
    if tensor.whole:
        return parts[0]
    sizes = [[entry.stop - entry.start for entry in of_rank] for of_rank in entries]
    whole = torch.zeros(torch.Size(tensor.shape).numel())
    if not len(whole):
        return whole
    mine = torch.cat(parts).float() if parts else torch.empty(0)
    for there, held, each in zip(
        ranks.exchange(mine, [sum(one) for one in sizes]), entries, sizes, strict=True
    ):
        for entry, part in zip(held, torch.split(there, each), strict=True):
            if len(part):
                put(whole, entry, part)
    return whole


def but_for_a_factor(
    every: Sequence[Judged], factor: ScriptFactor, summary: StepSummary, semantics: Semantics
) -> Full | None:
    """Return the verdict on gradients that are right but for a factor; None if one is wrong.

    every: of each rank, after the division by the factor.
    """
    if faults(every) or scaled([one.scales for one in every], summary, semantics) is not None:
        return None
    share = max((one.share for one in every), default=0.0)
    return Full(share, changes=multiplied(factor), factor=factor.value)


def _verdict(
    observed: Observed,
    local: Local,
    found: Mapping[Point, Judged],
    tensors: Sequence[RunParameter],
    semantics: Semantics,
    ranks: AllRanks,
    tied: Mapping[str, Sequence[str]],
) -> tuple[Full, Point]:
    """Return the verdict, and the point at which the gradient was judged; rank 0 has both."""
    gathered = [msgspec.msgpack.decode(one, type=list) for one in ranks.gather(_encoded(found))]
    at: Point = GIVEN
    every: Sequence[Judged] = ()
    asked: list[RunParameter] = []
    factor = NO_FACTOR
    if ranks.rank == 0:
        points = {
            point: [Judged(*of_rank[number]) for of_rank in gathered]
            for number, point in enumerate(found)
        }
        at, every = first_right(points, observed.summary, semantics)
        asked = worst(every, [one for one in tensors if one.name not in tied])
        if faults(every):
            factor = script_factor(points, observed.summary, semantics)
    plan = at, [one.name for one in asked], factor
    at, wanted, factor = agreed(plan, tuple[Point, list[str], ScriptFactor], ranks)
    if factor != NO_FACTOR:
        again = _judged(observed, local, (GIVEN,), tensors, semantics, ranks, factor, tied)
        gathered = [msgspec.msgpack.decode(one, type=list) for one in ranks.gather(_encoded(again))]
        every_again = [Judged(*of_rank[0]) for of_rank in gathered]
        found_again = but_for_a_factor(every_again, factor, observed.summary, semantics)
        if ranks.broadcast(b"1" if not ranks.rank and found_again is not None else b""):
            return found_again or Full(), GIVEN
    by_name = {one.name: one for one in tensors}
    asked = [by_name[name] for name in wanted]
    shown: list[Exhibit] = []
    if asked:
        given = ranks.gather(msgspec.msgpack.encode(exhibit(observed, local, asked, at)))
        shown = [msgspec.msgpack.decode(one, type=Exhibit) for one in given]
    if ranks.rank:
        return Full(), at
    share = max(one.share for one in every)
    wrong = violation(every, asked, shown, observed.summary, semantics)
    return Full(share, wrong or not_summed(every, tied, observed.summary)), at


def _encoded(found: Mapping[Point, Judged]) -> bytes:
    return msgspec.msgpack.encode([*found.values()])
