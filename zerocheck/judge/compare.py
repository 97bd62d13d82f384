"""Comparison of observed values with their enclosures, and the worst element outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from ..floating_point import Enclosure
from ..protocol.verdicts import Explanation, Obligation, Violation
from . import vectors
from .layout import Elements, ParameterLayout
from .pieces import Positions, of_each, pieces


class Misfit(NamedTuple):
    """Elements outside their enclosure. All float64 vectors of the same length.

    outside: mask; ratio: abs(observed - exact) / bound, infinite where NaN or where the bound is 0.
    """

    outside: torch.Tensor
    ratio: torch.Tensor
    observed: torch.Tensor
    exact: torch.Tensor
    bound: torch.Tensor


def compare(observed: torch.Tensor, enclosure: Enclosure) -> tuple[float, Misfit | None]:
    """Return (largest share of the bound in use, the misfit or None).

    Written as `not (error <= bound)`, so that NaN is outside. An infinity where the exact result
    rounds to it, and a NaN where the exact result is NaN, are what one device gives too: inside.
    So is either where the bound is infinite, since partial sums can overflow.
    """
    exact, bound = enclosure
    if not len(exact):
        return 0.0, None
    error = (observed - exact).abs()
    inside = error <= bound
    if bool(inside.all()):
        error /= bound
        return float(error.nan_to_num(nan=0.0, posinf=0.0).max()), None
    used = torch.where(inside, error / bound, 0.0).nan_to_num(nan=0.0, posinf=0.0)
    inside |= _same_exception(observed, enclosure)
    outside = ~inside
    if not bool(outside.any()):
        return float(used.max()), None
    ratio = torch.where(outside, (error / bound).nan_to_num(nan=math.inf, posinf=math.inf), 0.0)
    return float(ratio.max()), Misfit(outside, ratio, observed, exact, bound)


def first_outside(
    enclosures: Iterable[tuple[str, torch.Tensor, Enclosure]],
) -> tuple[float, str, Misfit | None]:
    """Return (largest share of the bound, role, misfit) of the first role that is outside.

    No misfit if all are inside.
    """
    share = 0.0
    for role, observed, enclosure in enclosures:
        used, misfit = compare(observed, enclosure)
        if misfit is not None:
            return used, role, misfit
        share = max(share, used)
    return share, "", None


def compare_pieces(
    at: Callable[[slice, Positions], tuple[torch.Tensor, Enclosure]], elements: Elements, size: int
) -> tuple[float, Misfit | None]:
    """Compare like `compare`, piece by piece.

    at(here, there): what was observed of a piece, and its enclosure; here: where it lies among the
    elements, there: in the flat vector of `size` elements.
    """
    share = 0.0
    compared = of_each(lambda here, there: compare(*at(here, there)), pieces(elements, size))
    for used, misfit in compared:
        if misfit is not None:
            return _whole_misfit(at, elements, size)
        share = max(share, used)
    return share, None


def _whole_misfit(
    at: Callable[[slice, Positions], tuple[torch.Tensor, Enclosure]], elements: Elements, size: int
) -> tuple[float, Misfit]:
    count = size if elements is None else len(elements)
    numbers = [vectors.empty(count, dtype=torch.float64) for _ in range(4)]
    whole = Misfit(torch.zeros(count, dtype=torch.bool), *numbers)
    whole.ratio.zero_()

    def take(here: slice, there: Positions) -> None:
        observed, enclosure = at(here, there)
        _, misfit = compare(observed, enclosure)
        if misfit is not None:
            whole.outside[here], whole.ratio[here] = misfit.outside, misfit.ratio
        whole.observed[here] = observed
        whole.exact[here], whole.bound[here] = enclosure

    for _ in of_each(take, pieces(elements, size)):
        pass
    return float(whole.ratio.max()), whole


def _same_exception(observed: torch.Tensor, enclosure: Enclosure) -> torch.Tensor:
    exact, bound = enclosure
    largest = torch.finfo(torch.float32).max
    overflow = (
        observed.isinf()
        & (exact.abs() + bound.nan_to_num(nan=0.0) >= largest)
        & (observed.sign() == exact.sign())
    )
    over = bound.isinf() & ~observed.isfinite()
    return overflow | over | (observed.isnan() & exact.isnan())


def all_finite(vector: torch.Tensor) -> bool:
    """Return True if every element is finite. A finite sum, fast to compute, shows it."""
    return math.isfinite(float(vector.sum())) or bool(vector.isfinite().all())


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return True if both are equal bit for bit, NaN included.

    Both contiguous, of one dtype and shape.
    """
    integer = _INTEGERS.get(left.dtype)
    if integer is None:
        return torch.equal(left, right)
    return torch.equal(left.view(integer), right.view(integer))


def different_bits(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Mask of the elements whose bits differ."""
    integer = _INTEGERS.get(left.dtype)
    if integer is not None:
        return left.contiguous().view(integer) != right.contiguous().view(integer)
    return left != right


_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
"""Integers of the same size, by which bits are compared."""


def describe(
    misfit: Misfit,
    layout: ParameterLayout,
    *,
    obligation: Obligation,
    step: int,
    role: str,
    ranks: tuple[int, ...],
    explanation: Explanation,
    elements: Elements = None,
) -> Violation:
    """Make the Violation for a misfit over `elements` of the flat vector (None: all of them)."""
    mask = misfit.outside
    if elements is not None:
        mask = torch.zeros(layout.size, dtype=torch.bool)
        mask[elements] = misfit.outside
    worst = int(misfit.ratio.argmax())
    place, index = layout.at(worst if elements is None else int(elements[worst]))
    names = layout.names_of(mask)
    ratio = float(misfit.ratio[worst])
    return Violation(
        obligation=obligation,
        step=step,
        role=role,
        tensors=(place.name, *(name for name in names if name != place.name)),
        ranks=ranks,
        explanation=explanation.text,
        element=index,
        observed=float(misfit.observed[worst]),
        expected=float(misfit.exact[worst]),
        bound=float(misfit.bound[worst]),
        ratio=ratio if math.isfinite(ratio) else None,
        wrong=int(torch.count_nonzero(misfit.outside)),
        total=misfit.outside.numel(),
        causes=explanation.causes,
        sentences=explanation.sentences,
    )


def exactly(expected: torch.Tensor) -> Enclosure:
    """Return the enclosure of a result that must be met exactly, flattened."""
    wide = expected.reshape(-1).to(torch.float64)
    return Enclosure(wide, torch.zeros_like(wide))
