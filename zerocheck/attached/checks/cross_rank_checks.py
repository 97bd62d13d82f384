"""Obligations that need all ranks: ownership, agreement on the step, and the norm.

Ranks send little for it: places and hashes of their shards, and their verdicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from msgspec.structs import replace

from ... import causes as bugs
from ...judge import skip
from ...judge.attribution.tensors import tensors
from ...judge.diagnose.unwritten import memory_of_a_job
from ...judge.obligation import Checked, ObligationCheck
from ...judge.ownership import Ownership
from ...judge.update import no_optimizer
from ...optimizers import OPTIMIZERS, STATES, states_of
from ...protocol.verdicts import Judgement, Obligation, Violation, statuses_of
from ..record.run_parameters import ShardMap, layout_of, run_parameters
from ..record.step_record import AFTER, FROZEN, NO_OPTIMIZER
from .copies import BUFFERS, COPIES, moved_by_ranks
from .joint_context import JointContext
from .norms import Norms
from .not_finite import FINITE, SKIPPED, first_words, with_first
from .published_copies import PUBLISHED
from .rank_checks import merged


def judge_all_ranks(context: JointContext) -> Judgement:
    """Judge the data of all ranks on a checked step."""
    violations: dict[Obligation, Violation] = {}
    shares: dict[Obligation, float] = {}
    exercised: set[Obligation] = set()
    with torch.no_grad(), memory_of_a_job():
        for obligation in OF_ALL_RANKS:
            for checked in obligation.check(context):
                found = checked.violation
                # A copy of a gradient that differs is a violation of another obligation.
                name = obligation.name if found is None else found.obligation
                exercised |= {obligation.name, name}
                shares[name] = max(checked.share, shares.get(name, 0.0))
                if found is not None:
                    violations.setdefault(name, found)
    return Judgement(
        statuses=statuses_of(violations, exercised),
        share=shares,
        violations=tuple(violations.values()),
        tier="state only",
        unjudged=_waiting(context)
        | _outside(context)
        | _aside(context)
        | _outer(context)
        | _skipped(context)
        | _own(context)
        | moved_by_ranks(context)
        | _others(context),
    )


def _waiting(context: JointContext) -> dict[Obligation, str]:
    """Return that what an optimizer without a step has is not judged, where others took theirs."""
    steps = context.summaries[0].steps
    idle = list(dict.fromkeys(one.name for one in steps if not one.reached))
    if not idle or len(idle) == len(steps):
        return {}
    return {"update": f"of what {' and '.join(idle)} has, which took no step, as its gradient"}


def _outside(context: JointContext) -> dict[Obligation, str]:
    """Return that tensors of the optimizer that are not in the model are not looked at."""
    count = max(summary.outside for summary in context.summaries)
    if not count:
        return {}
    text = f"{count} tensor{'s' if count > 1 else ''} of the optimizer not in the attached model: "
    return {"ownership": text + "copies may differ between ranks"}


def _aside(context: JointContext) -> dict[Obligation, str]:
    """Return that what the script itself changes before or after the update is not judged."""
    names = {name for summary in context.summaries for name in summary.aside}
    if not names:
        return {}
    them = tensors(names, layout_of(run_parameters(context.summaries)))
    text = f"the script itself changes {them}, which no optimizer updates"
    return {"update": text}


def _outer(context: JointContext) -> dict[Obligation, str]:
    """Return that what an optimizer around another one does after its step is not judged."""
    changes = [one for summary in context.summaries for one in summary.outer]
    if not changes:
        return {}
    names = {name for one in changes for name in one.tensors}
    layout = layout_of(run_parameters(context.summaries))
    outer, inner = changes[0].outer, changes[0].inner
    text = f"{outer} changes {tensors(names, layout)} after the step of {inner}, which is judged"
    return {"update": text}


def _own(context: JointContext) -> dict[Obligation, str]:
    """Return that what differs between ranks by design is not compared between them.

    Nor are its gradients, and norms that it is in.
    """
    names = context.own_of_ranks
    if not names:
        return {}
    layout = layout_of(run_parameters(context.summaries))
    verb = "differ" if len(names) > 1 else "differs"
    text = f"{tensors(names, layout)} {verb} between ranks, and the wrapper of the model does not "
    them = "them" if len(names) > 1 else "it"
    text += f"keep {them} equal: copies, gradients and norms of {them} are not compared"
    return {"publish": text}


def _others(context: JointContext) -> dict[Obligation, str]:
    """Return that a norm over several models is not judged."""
    if not any(clip.others for one in context.summaries for clip in one.clips):
        return {}
    return {"clip": "the norm, which is also that of parameters outside of the attached model"}


def _skipped(context: JointContext) -> dict[Obligation, str]:
    """Return that a gradient that is not finite is not judged, where all ranks skipped the step."""
    where = first_words(context.summaries, (SKIPPED,))
    if not where or any(one.took for one in context.summaries):
        return {}
    return {"gradient": f"it is not finite, and all ranks skipped the step: {where}"}


def _check_ownership(context: JointContext) -> Iterator[Checked]:
    """Check that the shards of parameters and states tile their tensors."""
    yield Checked(violation=Ownership(ShardMap(context.verdicts)).check(context.step, "state"))


def _check_agreement(context: JointContext) -> Iterator[Checked]:
    """Check that all ranks took one and the same step."""
    yield Checked(
        violation=with_first(
            _same_step(context)
            or skip.check_reports(context.summaries, step=context.step)
            or _decision(context),
            context,
        )
        or _options(context)
        or _counts(context)
    )


def _same_step(context: JointContext) -> Violation | None:
    summaries = context.summaries
    decisions = [("scale their losses", [one.scaling for one in summaries])]
    for steps in reversed([*zip(*(one.steps for one in summaries), strict=False)]):
        of = f" of {steps[0].name}" if len(summaries[0].steps) > 1 else ""
        decisions.insert(0, (f"took a step{of}", [step.took for step in steps]))
    for what, values in decisions:
        some = tuple(rank for rank, value in enumerate(values) if value)
        if 0 < len(some) < len(values):
            text = f"only some ranks {what} (ranks {', '.join(map(str, some))} of {len(summaries)})"
            found = context.violation("update", "step", text, bugs.RANKS_DISAGREE)
            return replace(found, ranks=some)
    return None


def _decision(context: JointContext) -> Violation | None:
    """Check that a GradScaler skips a step if and only if the gradient is not finite."""
    if not all(one.scaling for one in context.summaries):
        return None
    for steps in zip(*(one.steps for one in context.summaries), strict=False):
        if any(one.finite is None for one in steps):
            continue
        finite = all(one.finite for one in steps)
        found = skip.decision(
            skipped=steps[0].skipped, finite=finite, scaling=True, step=context.step
        )
        if found is not None:
            return found
    return None


def _options(context: JointContext) -> Violation | None:
    """Check that each parameter group has equal options on all ranks."""
    for rank, one in enumerate(context.verdicts):
        for number, (mine, first) in enumerate(
            zip(one.summary.options, context.verdicts[0].summary.options, strict=False)
        ):
            for name in OPTIMIZERS[mine.kind].fields.group:
                here, there = getattr(mine, name), getattr(first, name)
                if here != there:
                    text = f"parameter group {number} has {name} {there:g} on rank 0 and "
                    text += f"{here:g} on rank {rank}"
                    found = context.violation("update", "step", text, bugs.RANKS_DISAGREE)
                    return replace(found, ranks=(rank,), observed=here, expected=there)
    return None


def _counts(context: JointContext) -> Violation | None:
    """Check that each parameter has one step count, on all ranks that have a part of it."""
    known: dict[str, tuple[int, float]] = {}
    for rank, one in enumerate(context.verdicts):
        for piece, count in zip(one.summary.pieces, one.summary.after, strict=True):
            if count is None:
                continue
            first, other = known.setdefault(piece.name, (rank, count))
            if count != other:
                text = f"the optimizer's step count of {piece.name} is {other:g} on rank "
                text += f"{first} and {count:g} on rank {rank}"
                found = context.violation("update", "step", text, bugs.STEP_COUNT)
                return replace(
                    found, tensors=(piece.name,), ranks=(rank,), observed=count, expected=other
                )
    return None


def _of_ranks(name: Obligation, context: JointContext) -> Iterator[Checked]:
    """Yield the verdicts of all ranks on their own shards.

    A rank whose copy is right on another rank is left to `copies.py`: its finding is that its copy
    differs.
    """
    shares = [one.shares[name] for one in context.verdicts if name in one.shares]
    if not shares:
        return
    several = [
        violation
        for rank, one in enumerate(context.verdicts)
        for violation in one.violations
        if violation.obligation == name and not _right_elsewhere(context, rank, violation)
    ]
    whole = merged(several)
    if whole is not None:
        same = [one for one in several if one.role == whole.role]
        ranks = tuple(sorted({rank for one in same for rank in one.ranks}))
        # Copies of the same elements count once.
        if len(ranks) > 1 and all(one.tensors == whole.tensors for one in same):
            whole = replace(whole, wrong=same[0].wrong, total=same[0].total)
        whole = replace(whole, ranks=ranks)
    yield Checked(max(shares), whole)


def _right_elsewhere(context: JointContext, rank: int, violation: Violation) -> bool:
    if not violation.tensors or violation.tensors[0] in context.own_of_ranks:
        return False
    for number, piece in enumerate(context.verdicts[rank].summary.pieces):
        if piece.name != violation.tensors[0]:
            continue
        for other, _ in context.holders[piece.place]:
            same = [o for o in context.verdicts[other].violations if o.obligation == "update"]
            if other != rank and violation.obligation == "update" and not same:
                return _differs(context, rank, other, number)
    return False


def _differs(context: JointContext, rank: int, other: int, number: int) -> bool:
    place = context.verdicts[rank].summary.pieces[number].place
    there = next(n for r, n in context.holders[place] if r == other)
    mine, its = context.verdicts[rank].hashes[number], context.verdicts[other].hashes[there]
    return any(its[what] != mine[what] for what in mine if what in its)


def _never_updated(context: JointContext) -> Violation | None:
    """Check that each trainable parameter with a gradient has optimizer state on some rank."""
    summary = context.summaries[0]
    if not summary.took:
        return None
    pieces = [piece for one in context.summaries for piece in one.pieces]
    optimized = {piece.name for piece in pieces if piece.group not in (FROZEN, NO_OPTIMIZER)}
    lost = [
        (rank, piece.name)
        for rank, one in enumerate(context.verdicts)
        for piece, square in zip(one.summary.pieces, one.squares, strict=True)
        if piece.group == NO_OPTIMIZER and piece.name not in optimized and not square <= 0.0
    ]
    if lost:
        names = tuple(dict.fromkeys(name for _, name in lost))
        layout = layout_of(run_parameters(context.summaries))
        text = f"{no_optimizer(names, layout)}, though "
        text += (
            "they are trainable and got gradients"
            if len(names) > 1
            else ("it is trainable and got a gradient")
        )
        text += "; to keep it as it is, freeze it with requires_grad_(False)"
        found = context.violation("update", "parameter", text, bugs.NEVER_UPDATED)
        return replace(found, tensors=names, ranks=tuple(sorted({rank for rank, _ in lost})))
    for holders in context.holders.values():
        here = [(context.piece(h), context.verdicts[h[0]].hashes[h[1]]) for h in holders]
        if any(f"{AFTER}.{role}" in hashes for _, hashes in here for role in STATES):
            continue
        for (rank, _), (piece, hashes) in zip(holders, here, strict=True):
            step = summary.optimizer_of(piece)
            if step is None or not step.took:
                continue
            if not states_of(summary.options[piece.group].optimizer):
                continue  # it has none with these options
            if "gradient" in hashes and piece.local != (0,):
                text = f"{piece.name} has a gradient, and no rank has a state of it: it was "
                text += "not updated"
                found = context.violation("update", "parameter", text, bugs.NEVER_UPDATED)
                return replace(found, tensors=(piece.name,), ranks=(rank,))
    return None


def _check_never_updated(context: JointContext) -> Iterator[Checked]:
    yield Checked(violation=_never_updated(context))


def _check_cleared(context: JointContext) -> Iterator[Checked]:
    """Check that no update used the gradient of the step before once more."""
    kept = {rank: one.kept for rank, one in enumerate(context.summaries) if one.kept}
    if not kept:
        return
    names = tuple(dict.fromkeys(name for each in kept.values() for name in each))
    layout = layout_of(run_parameters(context.summaries))
    of = tensors(names, layout)
    text = f"the gradient of the step before is in the gradient of {of}: it was not cleared; call "
    text += "optimizer.zero_grad() before the first backward of a step"
    cause = bugs.GRADIENT_OF_THE_PREVIOUS_STEP_KEPT
    found = context.violation("gradient", "gradient", text, cause)
    yield Checked(violation=replace(found, tensors=names, ranks=tuple(kept)))


def _check_stages(context: JointContext) -> Iterator[Checked]:
    """Check that stages of a pipeline got what the stage beside them sent."""
    for one in context.verdicts:
        for found in one.violations:
            if found.obligation == "gradient":
                yield Checked(violation=found)


def _check_norm(context: JointContext) -> Iterator[Checked]:
    """Check the norms that ranks report, each element counted once."""
    clipped = {
        one.pieces[number].name
        for one in context.summaries
        for clip in one.clips
        for number in clip.pieces
    }
    if clipped and clipped.isdisjoint(context.own_of_ranks):
        yield Checked(*Norms(context.verdicts).check())


OF_ALL_RANKS: tuple[ObligationCheck[JointContext], ...] = (
    ObligationCheck("ownership", _check_ownership),
    ObligationCheck("update", _check_agreement),
    FINITE,
    ObligationCheck("update", partial(_of_ranks, "update")),
    ObligationCheck("clip", partial(_of_ranks, "clip")),
    ObligationCheck("update", _check_never_updated),
    ObligationCheck("gradient", _check_cleared),
    ObligationCheck("gradient", _check_stages),
    COPIES,
    BUFFERS,
    PUBLISHED,
    ObligationCheck("clip", _check_norm),
)
"""Obligations of a checked step, in order: where several are violated, the first is named first."""
