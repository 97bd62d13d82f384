"""Obligation: the norm and the clipped gradient.

Two bounds: the norm from the observed gradient, then the clipped gradient from the *reported*
norm, since a correct fp32 norm can be thousands of units of round-off away on large tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zerocheck_reference import clip_coefficient

from ..case.schema import Case
from ..contract.semantics import Semantics
from . import bounds
from .assemble import Held
from .bounds import Enclosure, U
from .compare import compare, describe, exactly
from .diagnose.clip import SENTENCES, Norm, clip_causes, norm_causes
from .layout import Layout
from .verdict import Violation


def elements_of(gradient: Held, rank: int) -> torch.Tensor:
    """All elements that some rank holds; those that `rank` holds as it holds them.

    Frozen parameters have no gradient and are left out. Where copies differ, which is another
    finding, each rank's clipping is judged by its own.
    """
    whole, plan = gradient.whole, gradient.plans[rank]
    if plan.index is None:
        return gradient.parts[rank]
    if not torch.equal(plan.gather(whole), gradient.parts[rank]):
        whole = whole.clone()
        plan.scatter(whole, gradient.parts[rank])
    covered = gradient.covered()
    return whole if covered is None else whole[covered]


def true_norm(elements: torch.Tensor, case: Case) -> float:
    """Norm of an observed gradient in float64."""
    if case.training.norm == "inf":
        return float(elements.abs().max()) if elements.numel() else 0.0
    return float(torch.linalg.vector_norm(elements, dtype=torch.float64))


def coefficient(norm: float, case: Case, semantics: Semantics) -> float:
    """What the gradient is multiplied by."""
    assert case.training.clip is not None
    return clip_coefficient(norm, case.training.clip, rule=semantics.clip)


def check_norm(
    reported: Sequence[float | None],
    gradient: Held,
    clipped: Held | None,
    case: Case,
    semantics: Semantics,
    *,
    step: int,
    previous: float | None = None,
) -> tuple[float, Violation | None]:
    """Every rank's reported norm against the enclosure of the true one. previous: reported at the
    step before."""
    share = 0.0
    bad: dict[int, tuple[float, float, float]] = {}
    for rank, norm in enumerate(reported):
        elements = elements_of(gradient, rank)
        exact = true_norm(elements, case)
        if norm is None or not math.isfinite(exact):
            continue
        relative, floor = _norm_bound(elements.numel(), case)
        error, bound = abs(norm - exact), relative * exact + floor
        if error <= bound:
            share = max(share, error / bound if bound else 0.0)
        else:
            bad[rank] = norm, exact, bound
    if not bad:
        return share, None
    causes: tuple[str, ...] | None = None
    for rank, (norm, exact, _) in bad.items():
        elements = elements_of(gradient, rank)
        part = gradient.parts[rank]
        found = norm_causes(
            Norm(
                norm, exact, elements, part, len(part) == len(elements), len(reported), previous,
                *_norm_bound(elements.numel(), case),
            ),
            case.training.norm,
        )  # fmt: skip
        causes = found if causes is None else tuple(c for c in causes if c in found)
    assert causes is not None
    rank, (norm, exact, bound) = next(iter(bad.items()))
    elements = elements_of(gradient, rank)
    relative = _norm_bound(elements.numel(), case)[0]
    mild = clipped is not None and _clipped_by(exact, relative, clipped, gradient, case, semantics)
    words = f"the reported norm is {norm:.9g}, the norm of the gradient is {exact:.9g}"
    words += "".join(f"; {SENTENCES[cause]}" for cause in causes[:1] if cause in SENTENCES)
    if mild and clipped is not None:
        same = norm >= 0 and _clipped_by(norm, relative, clipped, gradient, case, semantics)
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


def _norm_bound(elements: int, case: Case) -> tuple[float, float]:
    """(relative, absolute). Squares of tiny gradients underflow: each loses at most eta before
    the root. The largest element is exact."""
    if case.training.norm == "inf":
        return 0.0, 0.0
    return bounds.norm_relative(elements), math.sqrt(elements * bounds.ETA)


def check_clipped(
    clipped: Held,
    gradient: Held,
    reported: Sequence[float | None],
    layout: Layout,
    case: Case,
    semantics: Semantics,
    *,
    step: int,
) -> tuple[float, Violation | None]:
    """Every rank's clipped gradient, from its own gradient and its own reported norm."""
    share = 0.0
    for rank, (part, plan) in enumerate(zip(clipped.parts, clipped.plans, strict=True)):
        norm = reported[rank]
        elements = elements_of(gradient, rank)
        used_norm = true_norm(elements, case) if norm is None else norm
        before = plan.gather(gradient.whole).to(torch.float64)
        if plan is gradient.plans[rank]:
            before = gradient.parts[rank].to(torch.float64)
        enclosure = _enclosure(before, used_norm, case, semantics)
        if norm is None:
            slack = bounds.norm_relative(elements.numel())
            enclosure = Enclosure(enclosure.exact, enclosure.bound + slack * enclosure.exact.abs())
        used, misfit = compare(part, enclosure)
        share = max(share, used)
        if misfit is not None:
            assert case.training.clip is not None
            factor = coefficient(used_norm, case, semantics)
            text, causes = clip_causes(part, before, used_norm, factor, case.training.clip)
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


def _enclosure(before: torch.Tensor, norm: float, case: Case, semantics: Semantics) -> Enclosure:
    factor = coefficient(norm, case, semantics)
    enclosure = bounds.clipped(before, factor)
    if factor == 1.0 and not _near_one(norm, case):
        return exactly(before)
    return enclosure


def _near_one(norm: float, case: Case) -> bool:
    """Whether round-off decides if clipping is active: 4 u around the threshold."""
    assert case.training.clip is not None
    return abs(norm + 1e-6 - case.training.clip) <= 8 * U * case.training.clip


def _clipped_by(
    norm: float,
    relative: float,
    clipped: Held,
    gradient: Held,
    case: Case,
    semantics: Semantics,
) -> bool:
    """Whether the gradient was clipped by the true norm, whatever was reported."""
    before = gradient.whole.to(torch.float64)
    enclosure = _enclosure(before, norm, case, semantics)
    slack = relative * enclosure.exact.abs()
    return compare(clipped.whole, Enclosure(enclosure.exact, enclosure.bound + slack))[1] is None
