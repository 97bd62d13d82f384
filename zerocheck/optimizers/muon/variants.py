"""Known causes of a wrong update: Muon with one thing changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from zerocheck_reference import adjusted
from zerocheck_reference.muon import EPS

from ... import causes as bugs
from ...floating_point import BF16, Enclosure, U, rounded
from ..inputs import other_rates, scaled
from ..specification import Segment, UpdateElements
from . import bounds
from .bounds import MuonScalars

Named = Iterator[tuple[str, Enclosure]]

PARTS_OF_A_FUSED_MATRIX = (2, 3)
"""Matrices that models fuse along the rows: gate and up, or query, key and value."""

ITERATIONS = (1, 2, 3, 4, 6)
"""Other numbers of iterations that are tried. Of more of them round-off decides."""


def variants(segment: Segment) -> Named:
    """Enclose the result of the segment's role with each known mistake: (cause, enclosure)."""
    if segment.role == "momentum_buffer":
        yield from _of_buffer(segment)
    else:
        yield from _of_parameter(segment)


def _of_buffer(segment: Segment) -> Named:
    s, e = segment.scalars, segment.elements
    old, g, format = e.old["momentum_buffer"], e.gradient, e.format

    def buffer(
        b: torch.Tensor = old, gradient: torch.Tensor = g, momentum: float = s.momentum
    ) -> Enclosure:
        return bounds.momentum_buffer(b, gradient, momentum, format=format)

    if not format.narrow and torch.equal(segment.observed, segment.observed.bfloat16().double()):
        yield (
            bugs.ROUNDED_TO_BF16,
            bounds.momentum_buffer(old, g, s.momentum, format=BF16),
        )
    if segment.unclipped is not None:
        yield bugs.GRADIENT_BEFORE_CLIPPING, buffer(gradient=segment.unclipped)
    if segment.previous is not None and bool((segment.previous != g).any()):
        yield bugs.GRADIENT_OF_THE_PREVIOUS_STEP, buffer(gradient=segment.previous)
    for gradient in segment.in_memory:
        yield bugs.ELEMENTS_IN_MEMORY_ORDER, buffer(gradient=gradient)
    yield bugs.GRADIENT_WITH_THE_WRONG_SIGN, buffer(gradient=-g)
    for name, gradient in segment.gradients():
        if bool((gradient != g).any()):
            more = (2 + segment.microbatches) * U * gradient.abs()
            yield name, bounds.momentum_buffer(old, gradient, s.momentum, more, format)
    if bool(old.any()):
        yield bugs.MOMENTS_RESET, buffer(b=torch.zeros_like(old))
    exact = s.momentum * old + g
    error = 4 * format.u * (s.momentum * old.abs() + g.abs()) + 2 * format.eta
    yield bugs.GRADIENT_NOT_DAMPENED, rounded(exact, error, format)
    if s.weight_decay:
        term = s.weight_decay * e.parameter
        coupled = bounds.momentum_buffer(
            old, g + term, s.momentum, 3 * format.u * (g.abs() + term.abs()), format
        )
        yield bugs.L2_INSTEAD_OF_DECOUPLED, coupled
    exact, bound = buffer()
    norm = max(float(exact.norm()), EPS)
    # The norm and the quotient are rounded to bf16, the norm once more where it is a sum of shards.
    yield (
        bugs.MOMENTUM_NORMALIZED,
        Enclosure(exact / norm, (bound + 6 * BF16.u * exact.abs()) / norm),
    )


def _of_parameter(segment: Segment) -> Named:
    s, e = segment.scalars, segment.elements
    new, old = e.new["momentum_buffer"], e.old["momentum_buffer"]
    rate = s.lr * adjusted(e.shape, s.adjustment)
    d = bounds.direction(e, new, s)
    update, off = bounds.orthogonal(d, s, e.parts)

    def with_(rate: float = rate, **changed: float) -> Enclosure:
        return bounds.stepped(e, update, off, s._replace(**changed), rate=rate)

    for name, factor in _factors(segment):
        yield name, with_(rate=s.lr * factor)
    for count, dim in _shardings(segment):
        parts = d.chunk(count, dim)
        whole, apart = _of_parts(parts, s, dim)
        scales = _scales(e, parts, s, dim)
        for factors in (None, scales):
            yield bugs.ORTHOGONALIZED_BY_SHARD, _scaled(e, s, whole, apart, rate, factors)
        yield bugs.SCALE_OF_THE_SHARD, _scaled(e, s, update, off, rate, scales)
    for number in PARTS_OF_A_FUSED_MATRIX:
        if e.shape[0] % number == 0 and e.shape[0] > number:
            parts = d.chunk(number)
            whole, apart = _of_parts(parts, s, 0)
            for factors in (None, _scales(e, parts, s, 0)):
                yield bugs.ORTHOGONALIZED_IN_PARTS, _scaled(e, s, whole, apart, rate, factors)
    yield bugs.NOT_ORTHOGONALIZED, bounds.stepped(e, d.double().reshape(-1), 0.0, s, rate=rate)
    other, apart = bounds.orthogonal(d, s, e.parts, dtype=torch.float32)
    yield bugs.ORTHOGONALIZED_IN_ANOTHER_DTYPE, bounds.stepped(e, other, apart, s, rate=rate)
    for steps in ITERATIONS:
        other, apart = bounds.orthogonal(d, s, e.parts, steps=steps)
        yield (
            bugs.ANOTHER_NUMBER_OF_ITERATIONS,
            bounds.stepped(e, other, apart, s, rate=rate),
        )
    for name, elements, buffer, changed in _inputs(segment, new, old):
        other, apart = bounds.orthogonal(bounds.direction(elements, buffer, changed), s, e.parts)
        yield name, bounds.stepped(e, other, apart, s, rate=rate)
    yield from _of_decay(segment, update, off, rate)
    for cause, _, other_rate in other_rates(segment):
        changed_rate = rate / s.lr * other_rate if s.lr else 0.0
        yield cause, with_(rate=changed_rate, lr=other_rate)
    for option in scaled(segment, "weight_decay"):
        yield bugs.OPTION_SCALED, with_(**option)
    for group, other_rate in segment.others:
        factor = adjusted(e.shape, s.adjustment)
        for decay in dict.fromkeys((s.weight_decay, group.weight_decay)):
            if (other_rate, decay) != (s.lr, s.weight_decay):
                yield (
                    bugs.OPTIONS_OF_ANOTHER_GROUP,
                    with_(rate=other_rate * factor, lr=other_rate, weight_decay=decay),
                )


def _shardings(segment: Segment) -> Iterator[tuple[int, int]]:
    """Iterate over (number of shards, dim) of which one has several shards."""
    for dim, size in enumerate(segment.elements.shape):
        for count in dict.fromkeys(segment.ranks):
            if count > 1 and size > 1:
                yield count, dim


def _of_parts(
    parts: Sequence[torch.Tensor], s: MuonScalars, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Orthogonalize each part by itself: (the flat matrix, what it may be off by), float64."""
    made = [bounds.orthogonal(part, s) for part in parts]
    whole, apart = (
        torch.cat([one[which].view(part.shape) for one, part in zip(made, parts, strict=True)], dim)
        for which in (0, 1)
    )
    return whole.reshape(-1), apart.reshape(-1)


def _scales(
    e: UpdateElements, parts: Sequence[torch.Tensor], s: MuonScalars, dim: int
) -> torch.Tensor:
    """Return each element's factor on the learning rate by the shape of its part, over the right
    one."""
    right = adjusted(e.shape, s.adjustment)
    factors = [torch.full(p.shape, adjusted(p.shape, s.adjustment) / right) for p in parts]
    return torch.cat(factors, dim).double().reshape(-1)


def _scaled(
    e: UpdateElements,
    s: MuonScalars,
    update: torch.Tensor,
    off: torch.Tensor,
    rate: float,
    factors: torch.Tensor | None,
) -> Enclosure:
    """Return the step with an update that is multiplied element by element."""
    if factors is None:
        return bounds.stepped(e, update, off, s, rate=rate)
    # A rate that is computed in fp32 has one rounding more.
    wider = off * factors + 2 * U * (update * factors).abs()
    return bounds.stepped(e, update * factors, wider, s, rate=rate)


def _factors(segment: Segment) -> Iterator[tuple[str, float]]:
    """Iterate over (cause, other factor on the learning rate)."""
    s, (rows, columns) = segment.scalars, segment.elements.shape[-2:]
    right = adjusted((rows, columns), s.adjustment)
    for rule in ("original", "match_rms_adamw"):
        factor = adjusted((rows, columns), rule)
        if factor != right:
            yield bugs.ANOTHER_ADJUSTMENT, factor
    turned = adjusted((columns, rows), s.adjustment)
    if turned != right:
        yield bugs.SCALE_OF_THE_TRANSPOSED_MATRIX, turned
    if right != 1.0:
        yield bugs.ANOTHER_ADJUSTMENT, 1.0
    plain = math.sqrt(rows / columns)
    if plain != right:
        yield bugs.ANOTHER_ADJUSTMENT, plain


def _inputs(
    segment: Segment, new: torch.Tensor, old: torch.Tensor
) -> Iterator[tuple[str, UpdateElements, torch.Tensor, MuonScalars]]:
    """Iterate over (cause, elements, buffer, scalars) of a direction with another input."""
    s, e = segment.scalars, segment.elements
    other = s._replace(nesterov=not s.nesterov)
    yield bugs.NESTEROV_LEFT_OUT if s.nesterov else bugs.NESTEROV_ADDED, e, new, other
    yield bugs.MOMENTUM_LEFT_OUT, e, e.gradient, s._replace(nesterov=False)
    if bool(old.any()):
        yield bugs.MOMENTS_OF_THE_PREVIOUS_STEP, e, old, s
    if not s.nesterov:
        return  # the gradient is in the buffer alone
    if segment.unclipped is not None:
        yield bugs.GRADIENT_BEFORE_CLIPPING, e._replace(gradient=segment.unclipped), new, s
    for name, gradient in segment.gradients():
        if bool((gradient != e.gradient).any()):
            yield name, e._replace(gradient=gradient), new, s


def _of_decay(segment: Segment, update: torch.Tensor, off: torch.Tensor, rate: float) -> Named:
    s, e = segment.scalars, segment.elements
    decay = s.weight_decay
    if not decay:
        for group, _ in segment.others:
            if group.weight_decay:
                other = s._replace(weight_decay=group.weight_decay)
                yield (
                    bugs.WEIGHT_DECAY_ON_EXCLUDED_PARAMETERS,
                    bounds.stepped(e, update, off, other, rate=rate),
                )
        return
    for name, value in (
        (bugs.WEIGHT_DECAY_MISSING, 0.0),
        (bugs.WEIGHT_DECAY_TWICE, decay * (2 - s.lr * decay)),
        (bugs.WEIGHT_DECAY_BY_THE_ADJUSTED_RATE, decay * rate / s.lr if s.lr else decay),
        (bugs.WEIGHT_DECAY_WITHOUT_THE_LEARNING_RATE, decay / s.lr if s.lr else decay),
    ):
        if value != decay:
            exact, bound = bounds.stepped(e, update, off, s._replace(weight_decay=value), rate=rate)
            more = 3 * e.format.u * (e.parameter.abs() + exact.abs())
            yield name, Enclosure(exact, bound + more)
