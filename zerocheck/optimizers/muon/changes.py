"""Changes of a step that Muon alone may have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import msgspec
import torch

from zerocheck_reference import adjusted
from zerocheck_reference.muon import EPS

from ... import causes as bugs
from ...floating_point import BF16, Enclosure, U
from ..specification import Change, SegmentStep
from . import bounds

PARTS_OF_A_FUSED_MATRIX = (2, 3)
"""Matrices that models fuse along the rows: gate and up, or query, key and value."""

ITERATIONS = (1, 2, 3, 4, 6)
"""Other numbers of iterations that are tried. Of more of them round-off decides."""


def changes(step: SegmentStep) -> Iterator[Change]:
    """Iterate over them."""
    if step.role == "momentum_buffer":
        yield from _of_buffer(step)
    else:
        yield from _of_update(step)
        yield from _of_shards(step)
        yield from _of_rate(step)


def _of_buffer(step: SegmentStep) -> Iterator[Change]:
    s, e = step.scalars, step.elements
    g, u = e.gradient, e.format.u
    whole = g / (1 - s.momentum)
    error = e.error + 4 * u * whole.abs()
    words = "with the gradient whole, and not times 1 - momentum"
    yield step.change(bugs.GRADIENT_NOT_DAMPENED, words, gradient=whole, error=error)
    if s.weight_decay:
        term = s.weight_decay * e.parameter
        error = e.error + 3 * u * (g.abs() + term.abs())
        words = "with weight decay added to the gradient"
        yield step.change(bugs.L2_INSTEAD_OF_DECOUPLED, words, gradient=g + term, error=error)
    yield Change(bugs.MOMENTUM_NORMALIZED, "divided by its norm", partial(_normalized, step))


def _normalized(step: SegmentStep) -> Enclosure | None:
    """Divide the buffer. Norm and quotient are rounded to bf16, a norm of shards once more."""
    made = step.take()
    if made is None:
        return None
    norm = max(float(made.exact.norm()), EPS)
    return Enclosure(made.exact / norm, (made.bound + 6 * BF16.u * made.exact.abs()) / norm)


def _of_update(step: SegmentStep) -> Iterator[Change]:
    s, e, options = step.scalars, step.elements, step.segment.options
    d = bounds.direction(e, e.new["momentum_buffer"], s)

    def moved(update: torch.Tensor, off: torch.Tensor | float) -> Enclosure:
        return bounds.stepped(e, update, off, s)

    def made(**changed: object) -> Enclosure:
        return moved(*bounds.orthogonal(d, s, e.parts, **changed))  # type: ignore[arg-type]

    along = partial(moved, d.double().reshape(-1), 0.0)
    yield Change(bugs.NOT_ORTHOGONALIZED, "without orthogonalization", along)
    words = "orthogonalized in fp32, and not in bf16"
    fp32 = partial(made, dtype=torch.float32)
    yield Change(bugs.ORTHOGONALIZED_IN_ANOTHER_DTYPE, words, fp32)
    for steps in ITERATIONS:
        words = f"orthogonalized by {steps} iterations"
        yield Change(bugs.ANOTHER_NUMBER_OF_ITERATIONS, words, partial(made, steps=steps))
    plain = step.with_(options=msgspec.structs.replace(options, nesterov=False))
    words = "along the gradient, and not along the momentum buffer"
    new = {"momentum_buffer": e.gradient}
    yield step.change(bugs.MOMENTUM_LEFT_OUT, words, plain, new=new)


class _Parts:
    """Parts of a matrix along a dim."""

    def __init__(self, parts: Sequence[torch.Tensor], dim: int, step: SegmentStep) -> None:
        self.parts, self.dim, self.step = parts, dim, step

    @cached_property
    def alone(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Orthogonalize each part by itself: (the flat matrix, what it may be off by)."""
        made = [bounds.orthogonal(part, self.step.scalars) for part in self.parts]
        of = [
            [one[w].view(p.shape) for one, p in zip(made, self.parts, strict=True)] for w in (0, 1)
        ]
        whole, apart = (torch.cat(one, self.dim).reshape(-1) for one in of)
        return whole, apart

    def scales(self) -> torch.Tensor:
        """Return each element's factor on the rate by the shape of its part, over the right one."""
        adjustment = self.step.scalars.adjustment
        right = adjusted(self.step.elements.shape, adjustment)
        factors = [torch.full(p.shape, adjusted(p.shape, adjustment) / right) for p in self.parts]
        return torch.cat(factors, self.dim).double().reshape(-1)

    def made(self, *, alone: bool, scaled: bool) -> Enclosure:
        """Return the step. A rate that is computed in fp32 has one rounding more."""
        s, e = self.step.scalars, self.step.elements
        d = bounds.direction(e, e.new["momentum_buffer"], s)
        update, off = self.alone if alone else bounds.orthogonal(d, s, e.parts)
        if scaled:
            factors = self.scales()
            update = update * factors
            off = off * factors + 2 * U * update.abs()
        return bounds.stepped(e, update, off, s)


def _of_shards(step: SegmentStep) -> Iterator[Change]:
    s, e = step.scalars, step.elements
    d = bounds.direction(e, e.new["momentum_buffer"], s)
    of_shard = " and scaled by its shape"
    for dim, size in enumerate(e.shape):
        for count in dict.fromkeys(step.segment.ranks):
            if count < 2 or size < 2:
                continue
            one = _Parts(d.chunk(count, dim), dim, step)
            where = f"each shard of {count} along dim {dim}"
            for scaled in (False, True):
                words = f"with {where} orthogonalized alone{of_shard * scaled}"
                made = partial(one.made, alone=True, scaled=scaled)
                yield Change(bugs.ORTHOGONALIZED_BY_SHARD, words, made)
            made = partial(one.made, alone=False, scaled=True)
            yield Change(bugs.SCALE_OF_THE_SHARD, f"with {where} scaled by its shape", made)
    for number in PARTS_OF_A_FUSED_MATRIX:
        if e.shape[0] % number == 0 and e.shape[0] > number:
            one = _Parts(d.chunk(number), 0, step)
            for scaled in (False, True):
                words = f"orthogonalized in {number} parts along dim 0{of_shard * scaled}"
                made = partial(one.made, alone=True, scaled=scaled)
                yield Change(bugs.ORTHOGONALIZED_IN_PARTS, words, made)


def _of_rate(step: SegmentStep) -> Iterator[Change]:
    """Other factors for the shape of the matrix, and a decay by another rate than the own."""
    s, e = step.scalars, step.elements
    rows, columns = e.shape[-2:]
    right = adjusted((rows, columns), s.adjustment)
    update = None

    def moved(factor: float) -> Enclosure:
        nonlocal update
        if update is None:
            d = bounds.direction(e, e.new["momentum_buffer"], s)
            update = bounds.orthogonal(d, s, e.parts)
        return bounds.stepped(e, *update, s, rate=s.lr * factor)

    another = bugs.ANOTHER_ADJUSTMENT
    for cause, words, factor in (
        (another, "scaled by sqrt(max(1, rows / columns))", adjusted(e.shape, "original")),
        (another, "scaled by 0.2 sqrt(max(rows, columns))", adjusted(e.shape, "match_rms_adamw")),
        (another, "not scaled by its shape", 1.0),
        (another, "scaled by sqrt(rows / columns)", math.sqrt(rows / columns)),
        (
            bugs.SCALE_OF_THE_TRANSPOSED_MATRIX,
            "scaled by the shape of the transposed matrix",
            adjusted((columns, rows), s.adjustment),
        ),
    ):
        if factor != right:
            yield Change(cause, words, partial(moved, factor))
    decay = s.weight_decay
    if not decay or not s.lr:
        return
    if right != 1.0:
        cause = bugs.WEIGHT_DECAY_BY_THE_ADJUSTED_RATE
        words = "with weight decay times the learning rate that is scaled by the shape"
        yield step.change(cause, words, s._replace(weight_decay=decay * right), rounds=3)
