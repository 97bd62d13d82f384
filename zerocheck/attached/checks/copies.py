"""Obligation of all ranks: replicas are equal bit for bit: publish, and copies of the gradient.

Hashes are compared. For a copy that differs, the tensor is fetched from two ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from msgspec.structs import replace

from ... import causes as bugs
from ...causes.registry import said
from ...errors import few
from ...judge.compare import different_bits
from ...judge.diagnose.publish import causes
from ...judge.obligation import Checked, ObligationCheck
from ...optimizers import STATES
from ...protocol.verdicts import Obligation, Violation
from ..record.holdings import UNWRAPPED
from ..record.step_record import AFTER, BEFORE, NO_OPTIMIZER, MovedBuffer, element_of
from .joint_context import JointContext
from .norms import Holder


def _check_copies(context: JointContext) -> Iterator[Checked]:
    """Compare replicas before the step, gradients, and replicas after it."""
    if len(context.verdicts) == 1:
        return
    yield Checked()
    parted = False
    for when in (BEFORE, "gradient", AFTER):
        if when == AFTER and parted:
            return  # it comes from that
        if when == "gradient" and not all(one.reached for one in context.summaries):
            continue  # some rank did not reach the point at which its gradient is observed
        for role in ("",) if when == "gradient" else ("parameter", *STATES):
            what = f"{when}.{role}" if role else when
            different = [*different_copies(context, what)]
            if different:
                yield Checked(violation=_copy(context, what, role or "gradient", different))
                # A reduced gradient is the same even of parameters that are not.
                parted |= when == BEFORE


COPIES = ObligationCheck("publish", _check_copies)


def _moved(context: JointContext) -> dict[tuple[int, str], dict[int, MovedBuffer]]:
    """Return buffers that the script moved, by stage and name, on each rank."""
    buffers: dict[tuple[int, str], dict[int, MovedBuffer]] = {}
    for rank, one in enumerate(context.summaries):
        for moved in one.moved:
            buffers.setdefault((one.stage, moved.name), {})[rank] = moved
    return buffers


def _check_buffers(context: JointContext) -> Iterator[Checked]:
    """Compare buffers that the script moved, on all ranks of a stage, if they were equal before."""
    alike = [
        (name, each)
        for (_, name), each in _moved(context).items()
        if len(each) > 1 == len({one.before for one in each.values()})
    ]
    if not alike:
        return
    apart = [(name, each) for name, each in alike if len({one.after for one in each.values()}) > 1]
    if not apart:
        yield Checked()
        return
    names = tuple(dict.fromkeys(name for name, _ in apart))
    text = f"{few(names)} was equal on all ranks before the step; the script changed it outside of "
    text += "the forward, and now it differs between ranks, which train different models from here "
    text += "on. For a value of the rank's own, register the buffer with persistent=False"
    found = context.violation("buffers", "buffer", text, bugs.BUFFERS_MOVED_APART)
    ranks = tuple(sorted({rank for _, each in apart for rank in each}))
    yield Checked(violation=replace(found, tensors=names, ranks=ranks))


BUFFERS = ObligationCheck("buffers", _check_buffers)


def moved_by_ranks(context: JointContext) -> dict[Obligation, str]:
    """Return that what the script moves is not judged where ranks had other values before."""
    names = [
        name
        for (_, name), each in _moved(context).items()
        if len({one.before for one in each.values()}) > 1
    ]
    if not names:
        return {}
    text = "between ranks before the step, and the script changes"
    return {"buffers": f"{few(names)} differs {text} it: right only for a value of the rank's own"}


def different_copies(context: JointContext, what: str) -> Iterator[tuple[Holder, Holder]]:
    """Yield (right, wrong) for every copy that differs from most ranks', or the lowest's."""
    for holders in context.holders.values():
        if context.piece(holders[0]).name in context.own_of_ranks:
            continue
        hashes = {h: context.verdicts[h[0]].hashes[h[1]].get(what) for h in holders}
        here = {holder: one for holder, one in hashes.items() if one is not None}
        if what == "gradient" and any(
            context.piece(holder).group == NO_OPTIMIZER for holder in holders
        ):
            continue  # nothing uses it
        if what == "gradient" and 0 < len(here) < len(hashes):
            here = {holder: one or "none" for holder, one in hashes.items()}
        if len(set(here.values())) < 2:
            continue
        common = Counter(here.values()).most_common(1)[0][0]
        right = next(holder for holder, one in here.items() if one == common)
        for holder, one in here.items():
            if one != common:
                yield right, holder


def _copy(
    context: JointContext, what: str, role: str, different: list[tuple[Holder, Holder]]
) -> Violation:
    right, wrong = different[0]
    piece = context.piece(wrong)
    ranks = tuple(sorted({holder[0] for _, holder in different}))
    names = tuple(dict.fromkeys(context.piece(holder).name for _, holder in different))
    if role == "gradient":
        text = "the gradient that the optimizer was given differs between ranks that hold the "
        text += "same parameters: not all of them took part in its reduction, or it was "
        text += "changed after it"
        known: tuple[str, ...] = (bugs.COPIES_OF_THE_GRADIENT_DIFFER,)
    else:
        text = f"copies of {role} differ between ranks; they must agree bit for bit"
        known = (bugs.COPIES_DIFFER,)
    if what.startswith(BEFORE):
        text = f"before the step, {text}: they parted earlier"
    summary = context.verdicts[0].summary
    if not (what.startswith(AFTER) or summary.lines) and summary.what.startswith(UNWRAPPED):
        text += "; neither DDP nor FSDP wraps this model: where each rank trains one of its own, "
        text += "as in a pipeline, pass mesh="
    if len({*ranks, right[0]}) == len(context.verdicts) == 2:
        text += " (of two ranks, either can be the wrong one)"
    violation = Violation(
        obligation="gradient" if role == "gradient" else "publish",
        step=context.step,
        role=role,
        tensors=names,
        ranks=ranks,
        explanation=text,
        causes=known,
    )
    ours, theirs = context.fetch(right[0], what, right[1]), context.fetch(wrong[0], what, wrong[1])
    if ours is None or theirs is None:
        lacking = [h[0] for h, one in ((right, ours), (wrong, theirs)) if one is None]
        text += f"; rank {lacking[0]} has none of {piece.name}"
        return replace(violation, explanation=text)
    mask = different_bits(theirs, ours)
    where = mask.nonzero().reshape(-1)
    error = (theirs[where].double() - ours[where].double()).abs().nan_to_num(nan=torch.inf)
    worst = int(where[int(error.argmax())])
    if role != "gradient":
        known, text = _known(context, what, wrong, theirs, ours, where, text)
    return replace(
        violation,
        element=element_of(piece, worst),
        observed=float(theirs[worst]),
        expected=float(ours[worst]),
        bound=0.0,
        wrong=int(mask.sum()),
        total=mask.numel(),
        causes=known,
        explanation=text,
    )


def _known(
    context: JointContext,
    what: str,
    wrong: Holder,
    theirs: torch.Tensor,
    ours: torch.Tensor,
    where: torch.Tensor,
    text: str,
) -> tuple[tuple[str, ...], str]:
    """Return the causes that explain a differing copy, and the text of the finding.

    If no cause of copies explains it, they are the causes that the copy's own rank found.
    """
    earlier = None
    if what.startswith(AFTER):
        earlier = context.fetch(wrong[0], what.replace(AFTER, BEFORE, 1), wrong[1])
    found = causes(theirs[where], ours[where], None if earlier is None else earlier[where])
    if found != (bugs.COPIES_DIFFER,):
        return found, text + "".join(f"; {one}" for one in said(found).values())
    updates = [one for one in context.verdicts[wrong[0]].violations if one.obligation == "update"]
    if updates and updates[0].causes:
        text += f"; in this step, on rank {wrong[0]}: {updates[0].explanation}"
        return updates[0].causes, text
    return found, text
