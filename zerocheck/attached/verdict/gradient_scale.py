"""Check of the length of the gradient, where its elements are too coarse to say it.

In bf16 a local gradient is known to a few percent of its largest elements, and the margin on top
lets an element be off by half. A gradient that is off by one factor, such as the number of ranks,
is off along itself, where the errors of elements cancel: the projection of the observed gradient G'
on the expected one G, over all tensors of a kind, is 1 for a right one,

    S = <G', G> / <G, G>,

and off by at most MARGIN times the sum over tensors of sway * |G|. The sway of a tensor is how far
its local gradients move along themselves as all parameters are moved by one unit of round-off, the
most of NARROW_REPLICAS moves, summed over ranks; so it is as if all tensors and ranks were off the
same way. If all did move as one, a sixteenth of a standard deviation in each of four moves has the
chance 0.05 ** 4 = 6e-6. Two that move apart, such as one tensor on two ranks, have 1e-9: the sum of
their largest moves is below t with the chance 0.0024 t ** 8, at t = |e| / 16 for an error e of
variance 2, whose 8th moment is 1,680.

Tensors are of one kind if their names differ in numbers only. An axis, a wrapper or a script often
reduces some layers of each block in another way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from ... import causes as bugs
from ...contract.semantics import Semantics
from ...errors import few
from ...floating_point import Enclosure
from ...judge.diagnose.weights import KnownWeights, ReductionSetting, factors, of_axes, telling
from ...judge.estimate import MARGIN
from ...protocol.verdicts import Violation
from ..record.step_record import StepSummary

NARROW_REPLICAS = 4
"""Runs with parameters moved, where the model computes in bf16 or fp16."""

_NUMBER = re.compile(r"\d+")
_LEAST = 1e-300
"""Bound in place of 0, which exact gradients have."""
NO_SCALE = (0.0, 0.0, 0.0)
Scale = tuple[float, float, float]
"""<G', G>, <G, G> and the bound of the first, over what a rank holds."""


class Move(NamedTuple):
    """Move of a piece of a gradient, as a few numbers.

    largest: magnitude of the move D; size: of the gradient G; across, apart, inside: <D, G>, <D, D>
    and <G, G>; fourth: the sum of the 4th powers of G.
    """

    largest: float
    size: float
    across: float
    apart: float
    inside: float
    fourth: float

    @classmethod
    def of(cls, move: torch.Tensor, gradient: torch.Tensor) -> Move:
        """Measure a piece of a move D of the gradient G; both float64, flat."""
        squares = gradient.square()
        return cls(
            largest=float(move.abs().max()) if len(move) else 0.0,
            size=float(gradient.abs().max()) if len(gradient) else 0.0,
            across=float(move @ gradient),
            apart=float(move @ move),
            inside=float(gradient @ gradient),
            fourth=float(squares @ squares),
        )


def along(pieces: Sequence[Move], unit: float = 0.0) -> float:
    """Return how far the move of a gradient goes along it: <D, G> / |G|, or |D| where G is 0.

    unit: how far each element is rounded at its end, up or down, relative: the gradient of a bias
    may not move at all. It adds a standard deviation, unit * sqrt(sum of G ** 4) / |G|.
    """
    length = math.sqrt(sum(one.inside for one in pieces))
    if length:
        rounded = unit * math.sqrt(sum(one.fourth for one in pieces))
        return (abs(sum(one.across for one in pieces)) + rounded) / length
    return math.sqrt(sum(one.apart for one in pieces))


def projected(
    observed: torch.Tensor, part: Enclosure, *, length: float, sway: float, noise: float
) -> Scale:
    """Project a rank's shard of a tensor.

    part: enclosure of the shard; length: of the whole tensor's expected gradient; sway, noise: of
    that tensor, the latter as it is in the bounds of `part`.
    """
    if not math.isfinite(sway):
        return 0.0, 0.0, math.inf
    inside = float(part.exact @ part.exact)
    rounded = float((part.bound - noise).clamp(min=0.0) @ part.exact.abs())
    swayed = MARGIN * sway / length * inside if length else 0.0
    return float(observed @ part.exact), inside, swayed + rounded


def added(one: Scale, other: Scale) -> Scale:
    """Return the projections of two shards together."""
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def known_factors(summary: StepSummary, semantics: Semantics) -> Iterator[KnownWeights]:
    """Iterate over the factors of all local gradients that a known bug gives."""
    mean = semantics.average == "mean"
    its = ReductionSetting(summary.reducing, summary.forwards, mean, axes=summary.axes)
    yield from of_axes(its)
    yield from factors(its)


def _factor(scales: Iterable[Scale]) -> tuple[float, float]:
    """Return the factor of tensors and how far it may be off: 1 and infinite if it is not known."""
    observed, expected, off = (math.fsum(each) for each in zip(NO_SCALE, *scales, strict=True))
    if not expected or not math.isfinite(off) or not math.isfinite(observed):
        return 1.0, math.inf
    return observed / expected, off / expected


def scaled(
    scales: Sequence[Mapping[str, Scale]], summary: StepSummary, semantics: Semantics
) -> Violation | None:
    """Return the violation of a gradient that is too long or too short, or None.

    It is that of the whole gradient if all tensors can be off by one factor, else that of the kind
    that is off the most, and of those that are off as it is.

    scales: by tensor, of each rank. A copy that several ranks hold counts several times on both
    sides.
    """
    kinds: dict[str, dict[str, list[Scale]]] = {}
    for name, scale in (pair for one in scales for pair in one.items()):
        kinds.setdefault(_NUMBER.sub("*", name), {}).setdefault(name, []).append(scale)
    factors_of = {kind: _factor(chain(*shards.values())) for kind, shards in kinds.items()}
    known = {kind: pair for kind, pair in factors_of.items() if math.isfinite(pair[1])}
    if not known:
        return None
    worst, most = max(known.values(), key=lambda pair: abs(pair[0] - 1) / (pair[1] or _LEAST))
    alike = {kind for kind, (value, slack) in known.items() if abs(value - worst) <= slack + most}
    wrong = {kind for kind, (value, slack) in known.items() if abs(value - 1) > slack}
    judged = alike & wrong if wrong else known.keys()
    factor, bound = _factor(chain(*(scale for kind in judged for scale in kinds[kind].values())))
    if abs(factor - 1) <= bound:
        return None
    names = [name for kind in kinds if kind in judged for name in kinds[kind]]
    tensors = () if alike == known.keys() or not wrong else tuple(names)
    every = known_factors(summary, semantics)
    fitting = [weights for weights in every if abs(factor - weights.factor) <= bound]
    causes = {weights.cause: weights.words for weights in fitting}
    joint = {weights.cause: weights.joint for weights in fitting if weights.joint}
    said = telling(causes, summary.forwards, joint).values()
    words = "; or ".join(one.removeprefix("gradient is ") for one in said)
    words = words or f"{factor:.3g} times what it must be"
    of = f" of {few(tensors)}" if tensors else ""
    return Violation(
        obligation="gradient",
        step=summary.number,
        role="gradient",
        tensors=tensors,
        ranks=tuple(range(summary.world_size)),
        explanation=f"the gradient{of} as a whole is {words}",
        observed=factor,
        expected=1.0,
        bound=bound,
        ratio=abs(factor - 1) / bound if bound else None,
        causes=tuple(causes) or (bugs.GRADIENT_SCALED,),
    )
