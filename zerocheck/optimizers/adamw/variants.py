"""Known causes of a wrong update: AdamW with one thing changed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from ... import causes as bugs
from ...floating_point import BF16, ETA, SECOND_ORDER, Enclosure, Format, rounded
from ..inputs import other_rates, scaled
from ..specification import Segment, UpdateElements
from . import bounds


def variants(segment: Segment) -> Iterator[tuple[str, Enclosure]]:
    """Enclose the result of the segment's role with each known mistake: (cause, enclosure)."""
    if _in_bf16(segment):
        yield bugs.ROUNDED_TO_BF16, _right(segment, BF16)
    if segment.role == "parameter":
        yield from _of_parameter(segment)
    elif segment.role in ("exp_avg", "exp_avg_sq"):
        yield from _of_moment(segment)


def _in_bf16(segment: Segment) -> bool:
    """Return True if every observed value is a bf16 number, which few fp32 values are."""
    observed, format = segment.observed, segment.elements.format
    return not format.narrow and torch.equal(observed, observed.bfloat16().double())


def _right(segment: Segment, format: Format) -> Enclosure:
    """Enclose the right result of the segment's role in another format."""
    s, e = segment.scalars, segment.elements
    if segment.role == "exp_avg":
        return bounds.exp_avg(e.old["exp_avg"], e.gradient, s, format=format)
    if segment.role == "exp_avg_sq":
        return bounds.exp_avg_sq(e.old["exp_avg_sq"], e.gradient, s, format=format)
    return bounds.parameter(e.parameter, e.new["exp_avg"], largest(e), s, format)


def largest(elements: UpdateElements) -> torch.Tensor:
    """Second moment that the update divides by: with amsgrad the largest so far."""
    return elements.new.get("max_exp_avg_sq", elements.new["exp_avg_sq"])


def _of_moment(segment: Segment) -> Iterator[tuple[str, Enclosure]]:
    s, e = segment.scalars, segment.elements
    g, p, format, old = e.gradient, e.parameter, e.format, e.old[segment.role]
    plain = bounds.exp_avg if segment.role == "exp_avg" else bounds.exp_avg_sq
    formula = partial(plain, format=format)
    if s.weight_decay:
        coupled, size = g + s.weight_decay * p, g.abs() + (s.weight_decay * p).abs()
        error = 3 * format.u * size + format.eta
        yield bugs.L2_INSTEAD_OF_DECOUPLED, formula(old, coupled, s, error)
    if segment.unclipped is not None:
        yield bugs.GRADIENT_BEFORE_CLIPPING, formula(old, segment.unclipped, s)
    if segment.previous is not None and bool((segment.previous != g).any()):
        yield bugs.GRADIENT_OF_THE_PREVIOUS_STEP, formula(old, segment.previous, s)
    for gradient in segment.in_memory:
        yield bugs.ELEMENTS_IN_MEMORY_ORDER, formula(old, gradient, s)
    if s.beta1 != s.beta2:
        swapped = s._replace(beta1=s.beta2, beta2=s.beta1)
        yield bugs.BETAS_SWAPPED, formula(old, g, swapped)
    yield from _swapped(segment)
    if bool(old.any()):
        yield bugs.MOMENTS_RESET, formula(torch.zeros_like(old), g, s)
    for group, _ in segment.others:
        other = s._replace(beta1=group.beta1, beta2=group.beta2)
        if (group.beta1, group.beta2) != (s.beta1, s.beta2):
            yield bugs.OPTIONS_OF_ANOTHER_GROUP, formula(old, g, other)
    if segment.role == "exp_avg":
        yield bugs.GRADIENT_WITH_THE_WRONG_SIGN, formula(old, -g, s)


def _swapped(segment: Segment) -> Iterator[tuple[str, Enclosure]]:
    """Moments swapped, before this step or after it."""
    s, g, format = segment.scalars, segment.elements.gradient, segment.elements.format
    old_m, old_v = (segment.elements.old[role] for role in ("exp_avg", "exp_avg_sq"))
    if segment.role == "exp_avg":
        yield bugs.MOMENTS_SWAPPED, bounds.exp_avg(old_v, g, s, format=format)
        yield bugs.MOMENTS_SWAPPED, bounds.exp_avg_sq(old_v, g, s, format=format)
    else:
        yield bugs.MOMENTS_SWAPPED, bounds.exp_avg_sq(old_m, g, s, format=format)
        yield bugs.MOMENTS_SWAPPED, bounds.exp_avg(old_m, g, s, format=format)


def _of_parameter(segment: Segment) -> Iterator[tuple[str, Enclosure]]:
    s, e = segment.scalars, segment.elements
    p, m, v, format = e.parameter, e.new["exp_avg"], largest(e), e.format
    old_m, old_v = (e.old[role] for role in ("exp_avg", "exp_avg_sq"))

    def with_(**changed: float) -> Enclosure:
        return bounds.parameter(p, m, v, s._replace(**changed), format)

    decay = s.weight_decay
    if decay:
        yield bugs.WEIGHT_DECAY_MISSING, with_(weight_decay=0.0)
        u = format.u
        yield bugs.WEIGHT_DECAY_TWICE, _wider(with_(weight_decay=decay * (2 - s.lr * decay)), p, u)
        by_step = _wider(with_(weight_decay=decay / s.correction1), p, u)
        yield bugs.WEIGHT_DECAY_BY_THE_CORRECTED_STEP_SIZE, by_step
        plain = with_(weight_decay=0.0)
        factor = 1 - s.lr * decay
        right = with_()
        yield (
            bugs.WEIGHT_DECAY_TWICE,  # the second time after the update
            _wider(Enclosure(right.exact * factor, right.bound * abs(factor)), p, u),
        )
        yield (
            bugs.WEIGHT_DECAY_AFTER_THE_UPDATE,
            _wider(Enclosure(plain.exact * factor, plain.bound * abs(factor)), p, u),
        )
        if s.lr != 1.0:
            yield (
                bugs.WEIGHT_DECAY_WITHOUT_THE_LEARNING_RATE,
                _wider(with_(weight_decay=decay / s.lr), p, u),
            )
    for step, name in (
        (segment.step + 1, bugs.STEP_OFF_BY_1),
        (segment.step - 1, bugs.STEP_OFF_BY_1),
        (segment.step + 2, bugs.STEP_OFF_BY_2),
        (segment.step - 2, bugs.STEP_OFF_BY_2),
        (segment.since, bugs.STEPS_COUNTED_FROM_0),
        (segment.step * segment.microbatches, bugs.MICROBATCHES_COUNTED_AS_STEPS),
        (
            segment.step + segment.since * (segment.microbatches - 1),
            bugs.MICROBATCHES_COUNTED_AS_STEPS,
        ),
    ):
        if step > 0 and step != segment.step:
            yield (
                name,
                with_(
                    correction1=bounds.correction(s.beta1, step),
                    correction2=bounds.correction(s.beta2, step),
                ),
            )
    for first, second in ((old_m, old_v), (m, old_v), (old_m, v)):
        yield (
            bugs.MOMENTS_OF_THE_PREVIOUS_STEP,
            bounds.parameter(p, first, second, s, format),
        )
    yield bugs.NO_BIAS_CORRECTION, with_(correction1=1.0, correction2=1.0)
    yield bugs.EPS_INSIDE_THE_ROOT, _update(segment, (v / s.correction2 + s.eps).sqrt())
    yield bugs.EPS_BEFORE_THE_BIAS_CORRECTION, with_(eps=s.eps / s.correction2**0.5)
    for cause, _, rate in other_rates(segment):
        yield cause, with_(lr=rate)
    for option in scaled(segment, "weight_decay", "eps"):
        yield bugs.OPTION_SCALED, with_(**option)
    for group, rate in segment.others:
        if not decay and group.weight_decay:
            yield bugs.WEIGHT_DECAY_ON_EXCLUDED_PARAMETERS, with_(weight_decay=group.weight_decay)
        options = {"lr": rate, "weight_decay": group.weight_decay, "eps": group.eps}
        for some in ({"lr": rate}, options):
            yield bugs.OPTIONS_OF_ANOTHER_GROUP, with_(**some)


def _wider(enclosure: Enclosure, p: torch.Tensor, u: float) -> Enclosure:
    """Widen by two more roundings of the decayed parameter."""
    return Enclosure(enclosure.exact, enclosure.bound + 3 * u * (p.abs() + enclosure.exact.abs()))


def _update(segment: Segment, denominator: torch.Tensor) -> Enclosure:
    """Update with another denominator: the roundings of bounds.parameter, and 3 more."""
    s, e = segment.scalars, segment.elements
    u, format = e.format.u, e.format
    decayed = e.parameter * (1 - s.lr * s.weight_decay)
    step = s.lr / s.correction1 * e.new["exp_avg"] / denominator
    error = 2 * u * decayed.abs() + (10 * u + s.extra) * step.abs()
    error = error + 2 * format.eta + ETA / denominator
    exact, bound = rounded(decayed - step, error, format)
    return Enclosure(exact, bound * SECOND_ORDER)
