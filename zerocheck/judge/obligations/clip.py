"""Obligation: the norm and the clipped gradient.

Two bounds: the norm from the observed gradient, then the clipped gradient from the *reported*
norm, since a correct fp32 norm can be thousands of units of round-off away on large tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerocheck_reference import ClipRule, clip_coefficient

from ...case.schema import Case
from ...contract.semantics import Semantics
from ...protocol.verdicts import Violation
from .. import bounds, vectors
from ..assemble import Observation, RoleState
from ..bounds import Enclosure, Format, U
from ..compare import compare, compare_pieces, describe, exactly
from ..diagnose.clip import Norm, clip_causes, norm_causes, sentence_of
from ..layout import Elements, Formats, ParameterLayout
from ..pieces import Positions, split
from ..verdicts import Verdicts


def elements_of(gradient: RoleState, rank: int) -> torch.Tensor:
    """Return all elements that some rank holds; those that `rank` holds as it holds them.

    Frozen parameters have no gradient and are left out. Where copies differ, which is another
    finding, each rank's clipping is judged by its own, or its replica's.
    """
    whole = gradient.as_of(rank)
    covered = None if gradient.plans[rank].index is None else gradient.covered()
    if covered is None or bool(covered.all()):
        return whole
    return vectors.taken(whole, vectors.positions(covered))


def formats_of(gradient: RoleState, layout: ParameterLayout) -> Formats:
    """Return the formats of `elements_of`."""
    covered = gradient.covered()
    if covered is None or bool(covered.all()):
        return layout.formats
    if len(layout.formats.parts) == 1:
        return Formats(layout.formats.parts, int(torch.count_nonzero(covered)))
    return layout.formats.at(vectors.positions(covered))


class Squares(NamedTuple):
    """Sums of a gradient's squares: of all elements, and of those in a narrow format."""

    total: float
    narrow: float

    def and_of(self, elements: torch.Tensor, formats: Formats) -> Squares:
        """Return the sums with further elements added."""
        squares = elements.to(torch.float64).square()
        narrow = sum(float(_of(squares, e).sum()) for format, e in formats.parts if format.narrow)
        return Squares(self.total + float(squares.sum()), self.narrow + narrow)


def norm_relative(elements: torch.Tensor, formats: Formats, case: Case) -> float:
    """Relative error of the 2-norm of these elements."""
    squares = Squares(0.0, 0.0)
    if formats.narrow is not None:
        for here in split(len(elements)):
            squares = squares.and_of(elements[here], formats.at(here))
    return relative_of(squares, elements.numel(), formats.narrow, case)


def relative_of(squares: Squares, elements: int, narrow: Format | None, case: Case) -> float:
    """Relative error of the 2-norm of `elements` numbers. narrow: the narrow format among them."""
    if narrow is None:
        return bounds.norm_relative(elements)
    # The share itself is known to 2^-50, and a rounding of the rest moves it by 2 U.
    share = min(1.0, squares.narrow / squares.total * (1 + 4 * U)) if squares.total else 1.0
    return bounds.narrow_norm_relative(elements, share, case.world_size, narrow)


def narrow_only(formats: Formats) -> bool:
    """Return True if all elements are in bf16: torch's norm and coefficient are then bf16 too."""
    return all(format.narrow for format, _ in formats.parts)


def _of(vector: torch.Tensor, elements: Elements) -> torch.Tensor:
    return vector if elements is None else vector[elements]


def true_norm(elements: torch.Tensor, case: Case) -> float:
    """Compute the norm of an observed gradient in float64.

    With several pieces, the norm of their norms: one more rounding, of 2^-53.
    """
    order = torch.inf if case.training.norm == "inf" else 2.0
    if order == torch.inf and not elements.numel():
        return 0.0
    norms = [_norm_of(elements[here], order) for here in split(len(elements))]
    return float(norms[0] if len(norms) == 1 else _norm_of(torch.stack(norms), order))


def _norm_of(elements: torch.Tensor, order: float) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(elements, ord=order, dtype=torch.float64)
    return norm


def coefficient(norm: float, case: Case, semantics: Semantics) -> float:
    """Return the factor that clipping multiplies the gradient by."""
    assert case.training.clip is not None
    return clip_coefficient(norm, case.training.clip, rule=semantics.clip)


def check_step(
    gradient: RoleState,
    clipped: RoleState | None,
    observation: Observation,
    case: Case,
    semantics: Semantics,
    noted: Verdicts,
    *,
    step: int,
) -> None:
    """Judge the reported norm and the clipped gradient, as far as they were exposed."""
    layout = observation.layout
    norms = [rank.grad_norm for rank in observation.steps(step)]
    earlier = observation.steps(step - 1)[0].grad_norm if step > observation.first else None
    if any(norm is not None for norm in norms):
        scale = observation.loss_scales(step)[0]
        found = check_norm(
            norms,
            gradient,
            clipped,
            layout,
            case,
            semantics,
            step=step,
            previous=earlier,
            loss_scale=scale,
        )
        noted.note("clip", *found)
    if clipped is not None:
        noted.vacuity.clipped(
            (gradient.whole[here], clipped.whole[here]) for here in split(layout.size)
        )
        found = check_clipped(clipped, gradient, norms, layout, case, semantics, step=step)
        noted.note("clip", *found)


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
        part = gradient.parts[rank]
        wrong.append(
            Norm(
                norm, exact, elements, gradient.parts, rank, len(part) == len(elements), previous,
                *_norm_bound(elements, formats, case),
                {str(format.dtype): _of(elements, e) for format, e in formats.parts}, loss_scale,
                case.replicas, _by_tensor(gradient, rank, layout, case),
            )
        )  # fmt: skip
    causes = norm_causes(wrong, case.training.norm)
    rank, (norm, exact, bound) = next(iter(bad.items()))
    elements = elements_of(gradient, rank)
    relative = _norm_bound(elements, formats, case)[0]

    def clipped_by(norm: float) -> bool:
        return clipped is not None and _clipped_by(
            norm, relative, clipped, gradient, layout, case, semantics
        )

    mild = clipped_by(exact)
    words = f"the reported norm is {norm:.9g}, the norm of the gradient is {exact:.9g}"
    words += "".join(sentence_of(cause, wrong[0], case.training.norm) for cause in causes[:1])
    if mild:
        same = norm >= 0 and clipped_by(norm)
        words += (
            " (for this gradient both norms clip alike)"
            if same
            else " (only the report is wrong: clipping used the right one)"
        )
    return (abs(norm - exact) / bound if bound else math.inf), Violation(
        obligation="clip",
        step=step,
        role="norm",
        tensors=(),
        ranks=tuple(bad),
        explanation=words,
        observed=norm,
        expected=exact,
        bound=bound,
        ratio=abs(norm - exact) / bound if bound and math.isfinite(norm) else None,
        causes=causes,
        mild=mild,
    )


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
) -> tuple[float, Violation | None]:
    """Check every rank's clipped gradient, from its own gradient and its own reported norm."""
    share = 0.0
    all_formats = formats_of(gradient, layout)
    only = narrow_only(all_formats)
    for rank, (part, plan) in enumerate(zip(clipped.parts, clipped.plans, strict=True)):
        norm = reported[rank]
        elements = elements_of(gradient, rank) if norm is None else part[:0]
        used_norm = true_norm(elements, case) if norm is None else norm
        own = gradient.parts[rank] if plan is gradient.plans[rank] else None
        slack = norm_relative(elements, all_formats, case) if norm is None else 0.0

        def at(
            here: slice,
            there: Positions,
            part: torch.Tensor = part,
            own: torch.Tensor | None = own,
            norm: float = used_norm,
            slack: float = slack,
        ) -> tuple[torch.Tensor, Enclosure]:
            before = gradient.whole[there] if own is None else own[here]
            formats = layout.formats.at(there)
            exact, bound = _enclosure(
                before.to(torch.float64), norm, formats, only, case, semantics
            )
            return part[here], Enclosure(exact, bound + slack * exact.abs() if slack else bound)

        used, misfit = compare_pieces(at, plan.index, layout.size)
        share = max(share, used)
        if misfit is not None:
            assert case.training.clip is not None
            factor = coefficient(used_norm, case, semantics)
            text, causes = clip_causes(
                part,
                plan.gather(gradient.whole) if own is None else own,
                used_norm,
                factor,
                case.training.clip,
                layout.formats.at(plan.index),
                misfit.outside,
                _own_coefficient(gradient, rank, layout, case, semantics),
            )
            return share, describe(
                misfit,
                layout,
                obligation="clip",
                step=step,
                role="gradient",
                ranks=(rank,),
                elements=plan.index,
                explanation=text,
                causes=causes,
            )
    return share, None


def _own_coefficient(
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
    off = relative + floor / norm if norm else 0.0
    return coefficient(norm, case, semantics), off


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


def clipped_enclosure(
    before: torch.Tensor,
    norm: float,
    max_norm: float,
    formats: Formats,
    *,
    all_narrow: bool,
    rule: ClipRule = "min(1, c/(norm+eps))",
) -> Enclosure:
    """Enclose the gradient after clipping, given the reported norm. before: float64."""
    factor = clip_coefficient(norm, max_norm, rule=rule)
    u = max(format.u for format, _ in formats.parts) if all_narrow else U
    if factor == 1.0 and not _near_one(norm, max_norm, u):
        return exactly(before)

    def clipped(before: torch.Tensor, format: Format) -> Enclosure:
        return bounds.clipped(before, factor, format, all_narrow=all_narrow)

    return formats.enclose(clipped, before)


def _near_one(norm: float, max_norm: float, u: float) -> bool:
    """Return True if round-off decides whether clipping is active.

    Tolerance of 4 u around the threshold, u being that of the coefficient.
    """
    return abs(norm + 1e-6 - max_norm) <= 8 * u * max_norm


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
