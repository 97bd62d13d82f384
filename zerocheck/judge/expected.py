"""Enclosure of the reduced gradient: all local gradients, summed over the declared divisor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..case.schema import Case
from ..contract.semantics import Semantics
from ..floating_point import Enclosure, Format
from . import bounds
from .compare import all_finite
from .layout import ParameterLayout
from .local import Passes
from .pieces import Enclosing, Positions
from .precision import Path, declared, path_of


class Expected(NamedTuple):
    """Enclosure of the reduced gradient, and the parameters that have one at all."""

    of: Enclosing
    used: list[bool]

    @property
    def enclosure(self) -> Enclosure:
        """Enclosure of the whole vector."""
        return self.of.whole


def loss_divisor(case: Case, semantics: Semantics) -> float:
    """Return the divisor of the loss before the backward."""
    divisor = case.training.microbatches if semantics.divide == "loss" else 1
    return float(divisor * loss_ranks(case, semantics))


def loss_ranks(case: Case, semantics: Semantics) -> int:
    """Number of times a rank's gradient counts in the mean by which losses are divided, else 1."""
    return case.axes.data_parallel_size if semantics.in_losses else 1


def expected(
    passes: Passes,
    layout: ParameterLayout,
    case: Case,
    semantics: Semantics,
    *,
    scales: Sequence[float] = (),
    noise: torch.Tensor | float = 0.0,
) -> Expected:
    """Sum all local gradients over the declared divisor, and enclose the result.

    noise: tolerance of the sum of local gradients, where kernels are not the reference's.
    scales: loss scale of each rank. It is divided out after the reduction: exactly by a power of
    two, else with two roundings more; what underflows loses at most eta, before (divided by the
    scale) and after. Where the sum is not finite, it must be exactly that.
    """
    world, count = passes.gradients.shape[:2]
    divisor = float(world) if semantics.average == "mean" else 1.0
    if semantics.divide == "gradient":
        divisor *= count
    roundings = bounds.gradient_roundings(
        world_size=world,
        microbatches=count,
        average=semantics.reduction,
        divide=semantics.divide,
        accumulate=semantics.accumulate,
        mesh=case.axes,
    )
    if any(math.frexp(scale)[0] != 0.5 for scale in scales):
        roundings += 2
    scaled = any(scale != 1.0 for scale in scales)
    mixed = declared(semantics)
    path = path_of(case, semantics, microbatches=count) if mixed else ()

    def enclosure(exact: torch.Tensor, absolute: torch.Tensor, format: Format) -> Enclosure:
        over = torch.zeros((), dtype=torch.bool)
        if mixed:
            scale = min(scales, default=1.0)
            bound, over = _along(exact, absolute, path, format, scale, divisor)
        else:
            bound = bounds.gradient(exact, absolute, roundings, format).bound
        if scaled:
            bound = bound + format.eta * (1 + roundings / min(scales))
        if not all_finite(exact):
            bound = torch.where(exact.isfinite(), bound, 0.0)
        if bool(over.any()):
            # Then anything comes of the sum that is not finite; and nothing else, of such terms.
            exact = torch.where(over & ~exact.isfinite(), math.nan, exact)
            bound = bound.masked_fill(over, math.inf)
        return Enclosure(exact, bound)

    def estimated(exact: torch.Tensor, bound: torch.Tensor, at: Positions | None) -> Enclosure:
        if not isinstance(noise, torch.Tensor):
            return Enclosure(exact, bound)
        tolerance = (noise if at is None else noise[at]) / divisor
        return Enclosure(exact, bound + torch.where(exact.isfinite(), tolerance, 0.0))

    def at(positions: Positions | None) -> Enclosure:
        some = passes.gradients if positions is None else passes.gradients[..., positions]
        terms = some.to(torch.float64)
        exact = terms.sum((0, 1)) / divisor
        absolute = terms.abs().sum((0, 1)) / divisor
        derived = layout.formats.at(positions).enclose(enclosure, exact, absolute)
        return estimated(*derived, positions)

    return Expected(Enclosing(layout.size, at), passes.used.any(0).tolist())


def _along(
    exact: torch.Tensor,
    absolute: torch.Tensor,
    path: Path,
    format: Format,
    scale: float,
    divisor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bound along the path into a parameter's format, and an overflow mask.

    The mask is set where a partial sum can overflow fp16: none is larger than the absolute sum
    before it was divided.
    """
    if format.narrow and (not path or path[-1][1] != format):
        path = (*path, (1, format))
    over = torch.zeros((), dtype=torch.bool)
    for count, one in path:
        if one.dtype == torch.float16:
            largest = absolute * (scale * divisor * math.exp(2 * count * one.u))
            over = over | ~(largest < torch.finfo(one.dtype).max)
    return bounds.along(exact, absolute, path, scale).bound, over
