"""Obligations that a rank judges by its own shards, without communication: update and clip."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from msgspec.structs import replace

from ... import causes as bugs
from ...case.schema import Case, Optimizer, Training
from ...contract.semantics import Semantics
from ...floating_point import Format
from ...judge import skip
from ...judge.assemble import RoleState
from ...judge.compare import different_bits
from ...judge.diagnose.unwritten import memory_of_a_job
from ...judge.manifest_plan import ManifestPlan
from ...judge.obligation import Checked, ObligationCheck
from ...judge.obligations.clip import check_clipped
from ...judge.pieces import AT_ONCE
from ...judge.recipe import Update, UpdateRecipe
from ...judge.update import UpdateJudge
from ...optimizers import STATES, optimizer_of, states_of
from ...optimizers.specification import Reading
from ...protocol.verdicts import Violation
from ..record.step_record import AFTER, BEFORE, Clip, Observed, RankVerdict, StepSummary, element_of
from ..saves.samples import hash_of_samples
from .after_clipping import after_clipping
from .script_changes import change_of
from .slices import Slice, SliceContext
from .workers import in_threads

ORDER = ("step", *STATES, "parameter")
"""Order in which an optimizer computes: what comes first is wrong first."""


def judge_rank(observed: Observed) -> RankVerdict:
    """Judge this rank's own shards, and collect the data that the other ranks need for the rest."""
    with torch.no_grad(), memory_of_a_job():
        context = SliceContext(observed)
        shares: dict[str, float] = {}
        violations = [] if observed.between is None else [observed.between]
        for obligation in OF_A_SLICE:
            for checked in obligation.check(context):
                shares[obligation.name] = max(checked.share, shares.get(obligation.name, 0.0))
                if checked.violation is not None:
                    violations.append(_of_rank(checked.violation, context))
        squares, peaks = _sizes(context)
        return RankVerdict(
            summary=context.summary,
            hashes=tuple(context.hashes),
            squares=squares,
            peaks=peaks,
            shares=shares,
            violations=tuple(violations),
            samples=hash_of_samples((one.args, one.kwargs) for one in observed.forwards),
            change=change_of(context),
        )


def _of_rank(violation: Violation, context: SliceContext) -> Violation:
    summary = context.summary
    return replace(violation, ranks=(summary.rank,), step=summary.number)


def _sizes(context: SliceContext) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the sum of squares and the largest magnitude of each gradient before clipping."""
    squares, peaks = [], []
    for number in range(len(context.summary.pieces)):
        gradient = context.observed.before_clipping(number)
        if gradient is None:
            squares.append(-1.0)
            peaks.append(-1.0)
            continue
        parts = torch.split(gradient, AT_ONCE)
        squares.append(math.fsum(float(part.double().square().sum()) for part in parts))
        peaks.append(float(gradient.abs().max()) if gradient.numel() else 0.0)
    return tuple(squares), tuple(peaks)


def _check_update(context: SliceContext) -> Iterator[Checked]:
    """Judge the parameters of which this rank holds the state, and those that must not change."""
    summary = context.summary
    changed = [number for number in sorted(context.idle) if context.changed(number)]
    waiting = [
        number
        for number, piece in enumerate(summary.pieces)
        if not summary.took or (piece.group >= 0 and not context.took(number))
    ]
    if not summary.took or context.idle:
        still = [number for number in changed if number in waiting]
        yield Checked(violation=merged([*_untouched(context, still)]))
    kinds: dict[Optimizer, list[int]] = {}
    for number, piece in enumerate(summary.pieces):
        if number in waiting:
            continue
        options = summary.options[max(piece.group, 0)].optimizer
        if number in changed or _holds_update(context, number, options):
            kinds.setdefault(options, []).append(number)
    groups = tuple(one.group for one in summary.options)
    for options, numbers in kinds.items():
        given = replace(options, groups=groups)
        rates = [one.rates for one in summary.options]
        yield _updated(context, numbers, UpdateRecipe(optimizer_of(given), given, rates))


def _holds_update(context: SliceContext, number: int, options: Optimizer) -> bool:
    """Return True if the optimizer on this rank updates the piece.

    It then holds the states of the piece. Where the optimizer has none, every rank that holds a
    parameter has the values that its owner computed.
    """
    if number in context.idle or context.summary.pieces[number].group < 0:
        return False
    states = states_of(options)
    return not states or context.value(f"{AFTER}.{states[0]}", number) is not None


def _untouched(context: SliceContext, changed: Sequence[int]) -> Iterator[Violation]:
    """Yield what changed in a step that must change nothing."""
    summary = context.summary
    for part in context.slices(changed):
        before, after = (part.state(when, STATES) for when in (BEFORE, AFTER))
        step = summary.optimizer_of(summary.pieces[part.runs[0].number])
        skipped = summary.skipped if step is None else step.skipped
        why = "the step is reported as skipped" if skipped else "the optimizer took no step"
        found = skip.untouched(before, after, part.layout, step=summary.number, why=why)
        if found is not None:
            if not skipped:
                found = replace(found, causes=(bugs.UNTOUCHED_PARAMETER_CHANGED,))
            yield part.whole_tensors(found)


Readings = Mapping[str, Sequence[Reading]]
"""Readings of an optimizer's rules that are left, by the name of the rule."""


class _JudgedSlice(NamedTuple):
    """Verdict on the update of a slice. readings: those that are left after it."""

    share: float
    violation: Violation | None
    readings: Readings


def _updated(context: SliceContext, numbers: Sequence[int], recipe: UpdateRecipe) -> Checked:
    """Judge the slices, in threads.

    A reading that failed in one slice is out for those behind it. So a slice is judged again where
    one before it, in another thread, had a reading fail; the first is judged alone, since most
    readings that fail do so in it.
    """
    share, found = 0.0, []
    left = [*context.slices(numbers)]
    if not left:  # shards without elements
        return Checked()
    readings: Readings = _with_compiled(UpdateJudge(left[0].layout, recipe).readings)
    together = 1
    while left:
        count, known = 0, readings
        judged = partial(_of_slice, context, recipe, known)
        for one in in_threads(judged, left[:together]):
            count += 1
            share = max(share, one.share)
            if one.violation is not None:
                found.append(one.violation)
            if one.readings != known:
                readings = one.readings
                break
        left, together = left[count:], len(left)
    return Checked(share, _with_late(merged(found), context.summary))


def _of_slice(
    context: SliceContext, recipe: UpdateRecipe, readings: Readings, part: Slice
) -> _JudgedSlice:
    roles = recipe.optimizer.states_with(recipe.options)
    judge = UpdateJudge(part.layout, recipe)
    judge.readings = {name: [*those] for name, those in readings.items()}
    share, violation = judge.check(
        Update(
            part.state(BEFORE, roles),
            part.state(AFTER, roles),
            part.flat("gradient"),
            0.0,
            [options.lr for options in context.summary.options],
            part.has,
            part.flat("reduced") if part.has_any("reduced") else None,
        ),
        step=context.summary.number - 1,
    )
    wrong = None if violation is None else part.whole_tensors(violation)
    return _JudgedSlice(share, wrong, judge.readings)


def _with_late(violation: Violation | None, summary: StepSummary) -> Violation | None:
    """Say where a parameter was changed after the optimizer's step, if no cause explains it."""
    if violation is None or violation.causes or violation.role != "parameter":
        return violation
    late = [name for name in violation.tensors if name in summary.late]
    if not late:
        return violation
    return replace(
        violation,
        attribution=f"{late[0]} was changed in place after optimizer.step(); where the script "
        "means that (limits, a projection), end the checked step before it",
    )


def _with_compiled(readings: Readings) -> dict[str, list[Reading]]:
    """Add the reading of steps that are compiled, which a script may have and a case does not."""
    compiled: list[Reading] = ["single corrections"]
    return {
        name: [*left, *(compiled if "single" in left else [])] for name, left in readings.items()
    }


def _check_clip(context: SliceContext) -> Iterator[Checked]:
    """Judge each clipped gradient, from this rank's own and the reported norm."""
    for clip in context.summary.clips:
        if clip.kind == "value":
            yield Checked(violation=_limited(context, clip))
        else:
            yield _clipped(context, clip) if clip.kind in ("2", "inf") else Checked()
    if context.summary.clips:
        yield Checked(violation=after_clipping(context))


def _limited(context: SliceContext, clip: Clip) -> Violation | None:
    """Judge elements that were limited to [-v, v], bit for bit."""
    for number in clip.pieces:
        before, after = context.value("reduced", number), context.value("clipped", number)
        if before is None or after is None:
            continue
        expected = before.clamp(-clip.max_norm, clip.max_norm)
        mask = different_bits(after, expected)
        if bool(mask.any()):
            worst = int(mask.nonzero()[0])
            piece = context.summary.pieces[number]
            return Violation(
                obligation="clip",
                step=context.summary.number,
                role="gradient",
                tensors=(piece.name,),
                ranks=(),
                explanation=f"elements are not what limits of {clip.max_norm:g} make of them",
                element=element_of(piece, worst),
                observed=float(after[worst]),
                expected=float(expected[worst]),
                bound=0.0,
                wrong=int(mask.sum()),
                total=mask.numel(),
            )
    return None


def _clipped(context: SliceContext, clip: Clip) -> Checked:
    formats = {Format.of(context.summary.pieces[number].torch_dtype) for number in clip.pieces}
    case = Case(
        mesh=(1,), training=Training(clip=clip.max_norm, norm="inf" if clip.kind == "inf" else "2")
    )

    def judged(part: Slice) -> tuple[float, Violation | None]:
        used, violation = check_clipped(
            _role_state(part, "clipped"),
            _role_state(part, "reduced"),
            [clip.norm],
            part.layout,
            case,
            Semantics(),
            step=context.summary.number,
            narrow=all(format.narrow for format in formats),
        )
        return used, None if violation is None else part.whole_tensors(violation)

    every = [*in_threads(judged, [*context.slices(clip.pieces)])]
    found = [violation for _, violation in every if violation is not None]
    return Checked(max((used for used, _ in every), default=0.0), merged(found))


def _role_state(part: Slice, what: str) -> RoleState:
    """Return a gradient of the slice, as one rank that holds all of it."""
    whole = part.flat(what)
    plan = ManifestPlan(None, frozenset(part.layout.by_name), frozenset())
    return RoleState(whole, (whole,), (plan,), ((),))


OF_A_SLICE: tuple[ObligationCheck[SliceContext], ...] = (
    ObligationCheck("update", _check_update),
    ObligationCheck("clip", _check_clip),
)
"""Obligations that a rank judges alone, in order."""


def merged(found: Sequence[Violation]) -> Violation | None:
    """Merge the violations of all slices: what is computed first, where it is worst.

    Causes are those that explain all of them, if there are any; else those of the worst.
    """
    if not found:
        return None
    role = min((one.role for one in found), key=_order)
    same = [one for one in found if one.role == role]
    worst = max(same, key=_severity)
    causes = [cause for cause in worst.causes if all(cause in one.causes for one in same)]
    tensors = dict.fromkeys([*worst.tensors, *(name for one in same for name in one.tensors)])
    return replace(
        worst,
        tensors=tuple(tensors),
        wrong=sum(one.wrong for one in same),
        total=sum(one.total for one in same),
        causes=tuple(causes) or worst.causes,
    )


def _order(role: str) -> int:
    return ORDER.index(role) if role in ORDER else len(ORDER)


def _severity(violation: Violation) -> float:
    return torch.inf if violation.ratio is None else violation.ratio
