"""Norm and clipping of a gradient, with the bounds of both."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zerocheck_reference import ClipRule, clip_coefficient

from ..case.schema import Case
from ..contract.semantics import Semantics
from ..floating_point import Enclosure, Format, U
from . import bounds, vectors
from .assemble import RoleState
from .compare import exactly
from .layout import Elements, Formats, ParameterLayout
from .pieces import split


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
        narrow = sum(
            float(of_elements(squares, e).sum()) for format, e in formats.parts if format.narrow
        )
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


def of_elements(vector: torch.Tensor, elements: Elements) -> torch.Tensor:
    """Select elements of a vector; None selects all."""
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
