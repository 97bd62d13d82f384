"""Known causes of a wrong update: SGD with one thing changed.

Weight decay and the gradient enter the buffer where there is a momentum, and the parameter where
there is none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ... import causes as bugs
from ...floating_point import BF16, Enclosure, Format, U, all_inside, rounded
from ..coupled_decay import decayed, product
from ..inputs import other_rates, scaled
from ..specification import Segment
from . import bounds
from .bounds import SGDScalars

Named = Iterator[tuple[str, Enclosure]]


def variants(segment: Segment) -> Named:
    """Enclose the result of the segment's role with each known mistake: (cause, enclosure)."""
    s, format = segment.scalars, segment.elements.format
    observed = segment.observed
    if not format.narrow and torch.equal(observed, observed.bfloat16().double()):
        yield bugs.ROUNDED_TO_BF16, _result(segment, s, format=BF16)
    if segment.role == "momentum_buffer":
        yield from _of_inputs(segment)
        yield from _of_buffer(segment)
        return
    if not s.momentum:
        yield from _of_inputs(segment)
    else:
        yield from _of_momentum(segment)
    yield from _of_rates(segment)


def _result(
    segment: Segment,
    s: SGDScalars,
    *,
    g: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    g_rounds: int = 0,
    decay_rounds: int = 0,
    format: Format | None = None,
) -> Enclosure:
    """Enclose the role of the segment, with some inputs changed.

    g: the gradient; b: the old buffer where the buffer is wrong, else the new one; g_rounds,
    decay_rounds: further roundings of the gradient and of the decay.
    """
    e = segment.elements
    format = format or e.format
    g = e.gradient if g is None else g
    error = decay_rounds * e.format.u * (s.weight_decay * e.parameter).abs()
    error = error + g_rounds * U * g.abs()
    if segment.role == "momentum_buffer":
        old = e.old[segment.role] if b is None else b
        return bounds.momentum_buffer(e.parameter, old, g, s, error, format)
    new = e.new.get("momentum_buffer", torch.zeros_like(e.parameter)) if b is None else b
    return bounds.parameter(e.parameter, new, g, s, error, format)


def _of_inputs(segment: Segment) -> Named:
    """Mistakes in what is added up to d: the gradient and the decay."""
    s, g = segment.scalars, segment.elements.gradient
    yield from _of_decay(segment)
    if segment.unclipped is not None:
        yield bugs.GRADIENT_BEFORE_CLIPPING, _result(segment, s, g=segment.unclipped)
    if segment.previous is not None and bool((segment.previous != g).any()):
        yield bugs.GRADIENT_OF_THE_PREVIOUS_STEP, _result(segment, s, g=segment.previous)
    for gradient in segment.in_memory:
        yield bugs.ELEMENTS_IN_MEMORY_ORDER, _result(segment, s, g=gradient)
    yield bugs.GRADIENT_WITH_THE_WRONG_SIGN, _result(segment, s, g=-g)
    for name, gradient in segment.gradients():
        if bool((gradient != g).any()):
            yield name, _result(segment, s, g=gradient, g_rounds=2 + segment.microbatches)


def _of_decay(segment: Segment) -> Named:
    s = segment.scalars
    if s.weight_decay:
        missing = _result(segment, s._replace(weight_decay=0.0))
        yield _without_decay(segment), missing
        yield (
            bugs.WEIGHT_DECAY_TWICE,
            _result(segment, s._replace(weight_decay=2 * s.weight_decay), decay_rounds=3),
        )
    for group, _ in segment.others:
        other = s._replace(weight_decay=group.weight_decay)
        if group.weight_decay == s.weight_decay:
            continue
        name = bugs.OPTIONS_OF_ANOTHER_GROUP
        if not s.weight_decay:
            name = bugs.WEIGHT_DECAY_ON_EXCLUDED_PARAMETERS
        yield name, _result(segment, other)


def _without_decay(segment: Segment) -> str:
    """Return the cause of a missing decay: the parameter may have it decoupled."""
    e, s, after = segment.elements, segment.scalars, segment.parameter_after
    if segment.role != "momentum_buffer" or after is None:
        return bugs.WEIGHT_DECAY_MISSING
    decoupled = _decoupled(segment, s._replace(weight_decay=0.0))
    plain = bounds.parameter(
        e.parameter, e.new["momentum_buffer"], e.gradient, s._replace(weight_decay=0.0),
        format=e.format,
    )  # fmt: skip
    if all_inside(after, decoupled) and not all_inside(after, plain):
        return bugs.DECOUPLED_INSTEAD_OF_L2
    return bugs.WEIGHT_DECAY_MISSING


def _decoupled(segment: Segment, s: SGDScalars) -> Enclosure:
    """Enclose p (1 - lr weight_decay) - lr n, with n of the scalars `s`; two more roundings."""
    e, decay = segment.elements, segment.scalars.weight_decay
    n = bounds.direction(e.parameter, e.new["momentum_buffer"], e.gradient, s, format=e.format)
    kept = e.parameter * (1 - s.lr * decay)
    update = s.lr * n.exact
    error = product(update, e.format) + s.lr * n.error + 3 * e.format.u * kept.abs()
    return rounded(kept - update, bounds.grown(error, e.format), e.format)


def _of_buffer(segment: Segment) -> Named:
    """Mistakes in how the buffer takes in d."""
    s, e = segment.scalars, segment.elements
    old, format = e.old[segment.role], e.format
    if bool(old.any()):
        yield bugs.MOMENTS_RESET, _result(segment, s, b=torch.zeros_like(old))
    d = decayed(e.parameter, e.gradient, s.weight_decay, format=format)
    size = d.exact.abs() + d.error
    for name, factor in (
        (bugs.GRADIENT_DAMPENED, 1 - s.momentum),
        (bugs.LEARNING_RATE_IN_THE_MOMENTUM, s.lr),
    ):
        exact = s.momentum * old + factor * d.exact
        error = 4 * format.u * (s.momentum * old.abs() + factor * size) + factor * d.error
        yield name, rounded(exact, bounds.grown(error + 2 * format.eta, format), format)


def _of_momentum(segment: Segment) -> Named:
    """Mistakes in how the parameter uses the buffer."""
    s, e = segment.scalars, segment.elements
    if s.nesterov:
        yield bugs.NESTEROV_LEFT_OUT, _result(segment, s._replace(nesterov=False))
    else:
        yield bugs.NESTEROV_ADDED, _result(segment, s._replace(nesterov=True))
    yield bugs.MOMENTUM_LEFT_OUT, _result(segment, s._replace(momentum=0.0, nesterov=False))
    # Where the gradient is 0 the buffer is right for all that.
    yield bugs.LEARNING_RATE_IN_THE_MOMENTUM, _result(segment, s._replace(lr=1.0))
    old = e.old["momentum_buffer"]
    if bool(old.any()):
        yield bugs.MOMENTS_OF_THE_PREVIOUS_STEP, _result(segment, s, b=old)
    if s.weight_decay:
        yield bugs.WEIGHT_DECAY_TWICE, _decoupled(segment, s)


def _of_rates(segment: Segment) -> Named:
    s = segment.scalars
    for cause, _, rate in other_rates(segment):
        yield cause, _result(segment, s._replace(lr=rate))
    for option in scaled(segment, "weight_decay"):
        yield bugs.OPTION_SCALED, _result(segment, s._replace(**option))
    for group, rate in segment.others:
        for other in (s._replace(lr=rate), s._replace(lr=rate, weight_decay=group.weight_decay)):
            if other != s:
                yield bugs.OPTIONS_OF_ANOTHER_GROUP, _result(segment, other)
