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
from .compare import compare, describe
from .layout import Layout
from .verdict import Violation


def true_norm(gradient: Held, case: Case) -> tuple[float, int]:
    """(norm of the observed gradient in float64, number of its elements)."""
    there = gradient.values
    if case.training.norm == "inf":
        return float(there.abs().max()) if there.numel() else 0.0, there.numel()
    return float(torch.linalg.vector_norm(there, dtype=torch.float64)), there.numel()


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
) -> tuple[float, Violation | None]:
    """Every rank's reported norm against the enclosure of the true one."""
    exact, elements = true_norm(gradient, case)
    if not math.isfinite(exact):
        return 0.0, None
    relative = 0.0 if case.training.norm == "inf" else bounds.norm_relative(elements)
    # Squares of tiny gradients underflow: each loses at most eta before the root.
    floor = 0.0 if case.training.norm == "inf" else math.sqrt(elements * bounds.ETA)
    share = 0.0
    for rank, norm in enumerate(reported):
        if norm is None:
            continue
        error, bound = abs(norm - exact), relative * exact + floor
        if not error <= bound:
            mild = clipped is not None and _clipped_by(
                exact, relative, clipped, gradient, case, semantics
            )
            return error / bound if bound else math.inf, Violation(
                obligation="clip",
                step=step,
                role="norm",
                tensors=(),
                ranks=tuple(
                    r
                    for r, n in enumerate(reported)
                    if n is not None and not abs(n - exact) <= bound
                ),
                explanation=_norm_words(norm, exact, gradient, rank, mild),
                observed=norm,
                expected=exact,
                bound=bound,
                ratio=error / bound if bound and math.isfinite(error) else None,
                causes=_norm_causes(norm, exact, gradient, rank),
                mild=mild,
            )
        share = max(share, error / bound if bound else 0.0)
    return share, None


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
    exact_norm, elements = true_norm(gradient, case)
    for rank, (part, plan) in enumerate(zip(clipped.parts, clipped.plans, strict=True)):
        norm = reported[rank]
        before = plan.gather(gradient.whole).to(torch.float64)
        if plan is gradient.plans[rank]:
            before = gradient.parts[rank].to(torch.float64)
        enclosure = _enclosure(before, exact_norm if norm is None else norm, case, semantics)
        if norm is None:
            slack = bounds.norm_relative(elements)
            enclosure = Enclosure(enclosure.exact, enclosure.bound + slack * enclosure.exact.abs())
        used, misfit = compare(part, enclosure)
        share = max(share, used)
        if misfit is not None:
            text, causes = _clip_words(part, before, case)
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
        return Enclosure(before, torch.zeros_like(before))
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


def _norm_words(norm: float, exact: float, gradient: Held, rank: int, mild: bool) -> str:
    words = f"the reported norm is {norm:.9g}, the norm of the gradient is {exact:.9g}"
    if "local norm" in _norm_causes(norm, exact, gradient, rank):
        words += "; it is the norm of this rank's own shard alone"
    if mild:
        words += " (only the report is wrong: clipping used the right one)"
    return words


def _norm_causes(norm: float, exact: float, gradient: Held, rank: int) -> tuple[str, ...]:
    world = len(gradient.parts)
    close = 1e-3
    found: list[str] = []
    if world > 1 and exact > 0:
        if abs(norm / exact - math.sqrt(world)) < close:
            found.append("norm x sqrt(W)")
        if abs(norm / exact * math.sqrt(world) - 1) < close:
            found.append("norm / sqrt(W)")
        part = gradient.parts[rank]
        local = float(torch.linalg.vector_norm(part, dtype=torch.float64)) if part.numel() else 0.0
        if len(part) < len(gradient.whole) and abs(norm - local) <= close * exact:
            found.append("local norm")
    if norm == 0:
        found.append("norm of nothing")
    return tuple(found)


def _clip_words(
    part: torch.Tensor, before: torch.Tensor, case: Case
) -> tuple[str, tuple[str, ...]]:
    if torch.equal(part.to(torch.float64), before):
        return "the gradient was not clipped", ("not clipped",)
    return (
        f"the clipped gradient is not the gradient times the coefficient of its norm and "
        f"c = {case.training.clip:g}",
        (),
    )
