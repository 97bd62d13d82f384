"""Obligation: the norm and the clipped gradient.

Two bounds: the norm from the observed gradient, then the clipped gradient from the *reported*
norm, since a correct fp32 norm can be thousands of units of round-off away on large tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from ...case.schema import Case
from ...contract.semantics import Semantics
from ...floating_point import Enclosure
from ...protocol.verdicts import Explanation, Violation, with_attribution
from ..assemble import RoleState
from ..attribution.gradient import case_numbers
from ..attribution.guard import explained, guarded
from ..attribution.norm import attribution as norm_attribution
from ..attribution.norm import by_coefficients, squares
from ..clipping import (
    clipped_enclosure,
    coefficient,
    elements_of,
    formats_of,
    narrow_only,
    norm_relative,
    of_elements,
    true_norm,
)
from ..compare import compare, compare_pieces, describe
from ..context import StepContext
from ..diagnose.clip import Norm, clip_causes, norm_explanation, norm_together
from ..layout import Formats, ParameterLayout
from ..manifest_plan import cover_of
from ..obligation import Checked, ObligationCheck
from ..pieces import Positions, split


def check_norm(
    reported: Sequence[float | None],
    gradient: RoleState,
    clipped: RoleState | None,
    layout: ParameterLayout,
    case: Case,
    semantics: Semantics,
    *,
    step: int,
    previous: float | None = None,
    loss_scale: float = 1.0,
) -> tuple[float, Violation | None]:
    """Check every rank's reported norm against the enclosure of the true one.

    previous: reported at the step before; loss_scale: that of the step.
    """
    share = 0.0
    formats = formats_of(gradient, layout)
    bad: dict[int, tuple[float, float, float]] = {}
    for rank, norm in enumerate(reported):
        elements = elements_of(gradient, rank)
        exact = true_norm(elements, case)
        if norm is None or not math.isfinite(exact):
            continue
        relative, floor = _norm_bound(elements, formats, case)
        error, bound = abs(norm - exact), relative * exact + floor
        if error <= bound:
            share = max(share, error / bound if bound else 0.0)
        else:
            bad[rank] = norm, exact, bound
    if not bad:
        return share, None
    wrong: list[Norm] = []
    for rank, (norm, exact, _) in bad.items():
        elements = elements_of(gradient, rank)
        part, by_tensor = gradient.parts[rank], _by_tensor(gradient, rank, layout, case)
        wrong.append(
            Norm(
                norm, exact, elements, gradient.parts, rank, len(part) == len(elements), previous,
                *_norm_bound(elements, formats, case),
                {str(format.dtype): of_elements(elements, e) for format, e in formats.parts},
                loss_scale, case.axes.size("replicate"), by_tensor,
                *_by_axis(gradient, rank, by_tensor, case),
            )
        )  # fmt: skip
    explanation = norm_explanation(wrong, case.training.norm)
    rank, (norm, exact, bound) = next(iter(bad.items()))
    elements = elements_of(gradient, rank)
    relative = _norm_bound(elements, formats, case)[0]

    def clipped_by(norm: float) -> bool:
        return clipped is not None and _clipped_by(
            norm, relative, clipped, gradient, layout, case, semantics
        )

    mild = clipped_by(exact)
    violation = Violation(
        obligation="clip",
        step=step,
        role="norm",
        tensors=(),
        ranks=tuple(bad),
        explanation=explanation.text,
        observed=norm,
        expected=exact,
        bound=bound,
        ratio=abs(norm - exact) / bound if bound and math.isfinite(norm) else None,
        causes=explanation.causes,
        sentences=explanation.sentences,
        mild=mild,
        attribution=guarded(
            lambda: norm_attribution(
                norm,
                squares(gradient, layout),
                layout,
                case_numbers(case, len(gradient.parts), case.training.microbatches, loss_scale),
                relative,
                order=case.training.norm,
            )
        ),
    )
    if mild:
        alike = norm >= 0 and clipped_by(norm)
        why = "for this gradient both norms clip alike"
        why = why if alike else "only the report is wrong: clipping used the right one"
        violation = violation.reworded(lambda text: f"{text} ({why})")
    return (abs(norm - exact) / bound if bound else math.inf), violation


def _by_tensor(
    gradient: RoleState, rank: int, layout: ParameterLayout, case: Case
) -> dict[str, float]:
    """Return the norm of the gradient of each parameter that has one."""
    whole, covered = gradient.as_of(rank), gradient.covered()
    norms = {}
    for place in layout.places:
        part = whole[place.start : place.stop]
        part = part if covered is None else part[covered[place.start : place.stop]]
        if part.numel():
            norms[place.name] = true_norm(part, case)
    return norms


def _by_axis(
    gradient: RoleState, rank: int, by_tensor: Mapping[str, float], case: Case
) -> tuple[dict[str, frozenset[str]], list[tuple[str, list[float], int]]]:
    """Return `Norm.groups` of what other ranks along an axis hold, and `Norm.along`.

    The latter of the elements at each place along an axis, and of whole parameters.
    """
    mesh, whole = case.axes, gradient.as_of(rank)
    axes = mesh.names if mesh.parts("activations") > 1 else ()
    places = {
        axis: [
            [plan for r, plan in enumerate(gradient.plans) if mesh.coordinate(r, axis) == place]
            for place in range(mesh.size(axis))
        ]
        for axis in axes
    }
    names = {
        axis: [frozenset[str]().union(*(plan.present for plan in plans)) for plans in places[axis]]
        for axis in axes
    }
    missing: dict[str, frozenset[str]] = {}
    along: list[tuple[str, list[float], int]] = []
    for axis in axes:
        here = mesh.coordinate(rank, axis)
        gone, words = gradient.present - names[axis][here], f"the other ranks along {axis}"
        missing[words] = gone
        for other in axes:
            missing[f"{words} that all ranks along {other} hold"] = gone.intersection(*names[other])
        missing[f"the ranks along {axis} but the first"] = gradient.present - names[axis][0]
        masks = (cover_of(plans, len(whole)).mask for plans in places[axis])
        elements = [true_norm(whole if mask is None else whole[mask], case) for mask in masks]
        norms = ([by_tensor.get(name, 0.0) for name in its] for its in names[axis])
        parameters = [norm_together(its, case.training.norm) for its in norms]
        along += [(axis, elements, here), (axis, parameters, here)]
    return {words: gone for words, gone in missing.items() if gone}, along


def _norm_bound(elements: torch.Tensor, formats: Formats, case: Case) -> tuple[float, float]:
    """Return the norm's bound: (relative, absolute).

    Squares of tiny gradients underflow: each loses at most eta before the root. The largest element
    is exact.
    """
    if case.training.norm == "inf":
        return 0.0, 0.0
    eta = max(format.eta for format, _ in formats.parts)
    return norm_relative(elements, formats, case), math.sqrt(elements.numel() * eta)


def check_clipped(
    clipped: RoleState,
    gradient: RoleState,
    reported: Sequence[float | None],
    layout: ParameterLayout,
    case: Case,
    semantics: Semantics,
    *,
    step: int,
    narrow: bool | None = None,
) -> tuple[float, Violation | None]:
    """Check every rank's clipped gradient, from its own gradient and its own reported norm.

    narrow: every element that was clipped is in bf16, where `gradient` is only a part of them.
    """
    share = 0.0
    all_formats = formats_of(gradient, layout)
    only = narrow_only(all_formats) if narrow is None else narrow
    for rank, (part, plan) in enumerate(zip(clipped.parts, clipped.plans, strict=True)):
        norm = reported[rank]
        elements = elements_of(gradient, rank) if norm is None else part[:0]
        used_norm = true_norm(elements, case) if norm is None else norm
        local = gradient.parts[rank] if plan is gradient.plans[rank] else None
        slack = norm_relative(elements, all_formats, case) if norm is None else 0.0

        def at(
            here: slice,
            there: Positions,
            part: torch.Tensor = part,
            local: torch.Tensor | None = local,
            norm: float = used_norm,
            slack: float = slack,
        ) -> tuple[torch.Tensor, Enclosure]:
            before = gradient.whole[there] if local is None else local[here]
            formats = layout.formats.at(there)
            exact, bound = _enclosure(
                before.to(torch.float64), norm, formats, only, case, semantics
            )
            return part[here], Enclosure(exact, bound + slack * exact.abs())

        used, misfit = compare_pieces(at, plan.index, layout.size)
        share = max(share, used)
        if misfit is not None:
            assert case.training.clip is not None
            factor = coefficient(used_norm, case, semantics)
            explanation = clip_causes(
                part,
                plan.gather(gradient.whole) if local is None else local,
                used_norm,
                factor,
                case.training.clip,
                layout.formats.at(plan.index),
                misfit.outside,
                _local_coefficient(gradient, rank, layout, case, semantics),
            )
            made_of = explained(
                lambda: _by_coefficients(clipped, gradient, layout, case, semantics)
            )
            if made_of.causes and not explanation.causes:
                explanation = made_of
            violation = describe(
                misfit,
                layout,
                obligation="clip",
                step=step,
                role="gradient",
                ranks=(rank,),
                elements=plan.index,
                explanation=explanation,
            )
            return share, with_attribution(violation, made_of.text)
    return share, None


def _by_coefficients(
    clipped: RoleState,
    gradient: RoleState,
    layout: ParameterLayout,
    case: Case,
    semantics: Semantics,
) -> Explanation:
    relative = norm_relative(gradient.whole, formats_of(gradient, layout), case)
    return by_coefficients(
        clipped, gradient, layout, lambda norm: coefficient(norm, case, semantics), relative
    )


def _local_coefficient(
    gradient: RoleState, rank: int, layout: ParameterLayout, case: Case, semantics: Semantics
) -> tuple[float, float] | None:
    """Return the coefficient of the norm of the rank's own shard, and that norm's relative error.

    None if the rank holds all or nothing.
    """
    part, index = gradient.parts[rank], gradient.plans[rank].index
    if index is None or not part.numel():
        return None
    relative, floor = _norm_bound(part, layout.formats.at(index), case)
    norm = true_norm(part, case)
    error = relative + floor / norm if norm else 0.0
    return coefficient(norm, case, semantics), error


def _enclosure(
    before: torch.Tensor,
    norm: float,
    formats: Formats,
    all_narrow: bool,
    case: Case,
    semantics: Semantics,
) -> Enclosure:
    assert case.training.clip is not None
    return clipped_enclosure(
        before, norm, case.training.clip, formats, all_narrow=all_narrow, rule=semantics.clip
    )


def _clipped_by(
    norm: float,
    relative: float,
    clipped: RoleState,
    gradient: RoleState,
    layout: ParameterLayout,
    case: Case,
    semantics: Semantics,
) -> bool:
    """Return True if the gradient was clipped by the true norm, whatever was reported."""
    only = narrow_only(formats_of(gradient, layout))
    for here in split(layout.size):
        before = gradient.whole[here].to(torch.float64)
        formats = layout.formats.at(here)
        exact, bound = _enclosure(before, norm, formats, only, case, semantics)
        enclosure = Enclosure(exact, bound + relative * exact.abs())
        if compare(clipped.whole[here], enclosure)[1] is not None:
            return False
    return True


def _check_step(step: StepContext) -> Iterator[Checked]:
    """Judge the reported norm and the clipped gradient, as far as they were exposed."""
    if step.case.training.clip is None or step.skipping[0]:
        return
    gradient = step.reduced
    if gradient is not None:
        yield from _exposed(step, gradient, step.clipped)
    if step.recovered_clip is not None:
        yield Checked(*step.recovered_clip)


def _earlier_norm(step: StepContext) -> float | None:
    """Return the norm that was reported in the step before, for the diagnosis."""
    observation = step.observation
    if step.index == observation.first:
        return None
    return observation.steps(step.index - 1)[0].grad_norm


def _exposed(
    step: StepContext, gradient: RoleState, clipped: RoleState | None
) -> Iterator[Checked]:
    observation, index = step.observation, step.index
    if "ownership" in step.verdicts.violations:
        return
    if "gradient" in step.verdicts.violations and not gradient.agree:
        return  # copies differ, so no norm is that of the gradient: one bug, one finding
    norms = [rank.grad_norm for rank in observation.steps(index)]
    if any(norm is not None for norm in norms):
        yield Checked(
            *check_norm(
                norms,
                gradient,
                clipped,
                step.layout,
                step.case,
                step.semantics,
                step=index,
                previous=_earlier_norm(step),
                loss_scale=observation.loss_scales(index)[0],
            )
        )
    if clipped is not None:
        step.verdicts.vacuity.clipped(
            (gradient.whole[here], clipped.whole[here]) for here in split(step.layout.size)
        )
        yield Checked(
            *check_clipped(
                clipped, gradient, norms, step.layout, step.case, step.semantics, step=index
            )
        )


CLIP = ObligationCheck("clip", _check_step, frozenset({"state"}))
