"""Check of the length of the whole gradient, where its elements are too coarse to say it.

In bf16 a local gradient is known to a few percent of its largest elements, and the margin on top
lets an element be off by half. A gradient that is off by one factor, such as the number of ranks,
is off along itself, where the errors of elements cancel: the projection of the observed gradient G'
on the expected one G, over all tensors, is 1 for a right one,

    S = <G', G> / <G, G>,

and off by at most MARGIN times the sum over tensors of sway * |G|. The sway of a tensor is how far
its local gradients move along themselves as all parameters are moved by one unit of round-off, the
most of NARROW_REPLICAS moves, summed over ranks; so it is as if all tensors and ranks were off the
same way. If all did move as one, a sixteenth of a standard deviation in each of four moves has the
chance 0.05 ** 4 = 6e-6.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from .. import causes as bugs
from ..floating_point import Enclosure
from ..judge.estimate import MARGIN
from ..protocol.verdicts import Violation
from .step_record import StepSummary

if TYPE_CHECKING:
    from .reduced_gradient import Total

NARROW_REPLICAS = 4
"""Runs with parameters moved, where the model computes in bf16 or fp16."""

NO_SCALE = (0.0, 0.0, 0.0)
Scale = tuple[float, float, float]
"""<G', G>, <G, G> and the bound of the first, over what a rank holds."""


def along(move: torch.Tensor, gradient: torch.Tensor) -> float:
    """Return how far a move of a gradient goes along it; both float64, flat."""
    length = float(gradient.norm())
    return abs(float(move @ gradient)) / length if length else float(move.norm())


def projected(observed: torch.Tensor, part: Enclosure, whole: Enclosure, total: Total) -> Scale:
    """Project a rank's shard of a tensor. part, whole: enclosures of the shard and the tensor."""
    if not math.isfinite(total.sway):
        return 0.0, 0.0, math.inf
    inside = float(part.exact @ part.exact)
    length = float(whole.exact.norm())
    divisor = float(total.exact.norm()) / length if length else 1.0
    off = MARGIN * total.sway / divisor
    rounded = float((part.bound - total.noise / divisor).clamp(min=0.0) @ part.exact.abs())
    return (
        float(observed @ part.exact),
        inside,
        (off / length * inside if length else 0.0) + rounded,
    )


def added(one: Scale, other: Scale) -> Scale:
    """Return the projections of two shards together."""
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def scaled(scales: Sequence[Scale], summary: StepSummary) -> Violation | None:
    """Return the violation of a gradient that is too long or too short as a whole.

    scales: of each rank. A copy that several ranks hold counts several times on both sides.
    """
    observed, expected, off = (math.fsum(each) for each in zip(*scales, strict=True))
    if not expected or not math.isfinite(off) or not math.isfinite(observed):
        return None
    factor, bound = observed / expected, off / expected
    if abs(factor - 1) <= bound:
        return None
    known = [
        (name, words) for name, value, words in _factors(summary) if abs(factor - value) <= bound
    ]
    words = " or ".join(words for _, words in known) or f"{factor:.3g} times what it must be"
    return Violation(
        obligation="gradient",
        step=summary.number,
        role="gradient",
        tensors=(),
        ranks=tuple(range(summary.world_size)),
        explanation=f"the gradient as a whole is {words}",
        observed=factor,
        expected=1.0,
        bound=bound,
        ratio=abs(factor - 1) / bound if bound else None,
        causes=tuple(name for name, _ in known) or (bugs.GRADIENT_SCALED,),
    )


def _factors(summary: StepSummary) -> Iterator[tuple[str, float, str]]:
    """Yield (cause, factor, words) of the factors that are known."""
    world, count = summary.world_size, summary.forwards
    if world > 1:
        yield bugs.GRADIENT_TIMES_W, world, f"W = {world} times too large"
        yield bugs.GRADIENT_OVER_W, 1 / world, f"W = {world} times too small"
        root = math.sqrt(world)
        yield bugs.GRADIENT_TIMES_ROOT_W, root, f"sqrt(W) = {root:.4g} times too large"
        yield bugs.GRADIENT_OVER_ROOT_W, 1 / root, f"sqrt(W) = {root:.4g} times too small"
    if count > 1:
        yield bugs.GRADIENT_TIMES_GA, count, f"GA = {count} times too large"
        yield bugs.GRADIENT_OVER_GA, 1 / count, f"GA = {count} times too small"
    if count > 1 and world > 1:
        both = world * count
        yield bugs.GRADIENT_TIMES_W_TIMES_GA, both, f"W x GA = {both} times too large"
    yield bugs.GRADIENT_DOUBLED, 2.0, "2 times too large"
