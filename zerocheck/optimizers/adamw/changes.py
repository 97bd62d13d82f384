"""Changes of a step that AdamW or Adam alone may have."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import sqrt

import torch

from ... import causes as bugs
from ...floating_point import ETA, SECOND_ORDER, Enclosure, rounded
from ..specification import Change, SegmentStep, UpdateElements
from . import bounds


def largest(elements: UpdateElements) -> torch.Tensor:
    """Second moment that the update divides by: with amsgrad the largest so far."""
    return elements.new.get("max_exp_avg_sq", elements.new["exp_avg_sq"])


def changes(step: SegmentStep) -> Iterator[Change]:
    """Iterate over them."""
    if step.role == "parameter":
        yield from _of_corrections(step)
        yield from _of_moments(step)
        yield from _of_eps(step)
        if step.scalars.weight_decay and not step.rule.couples_decay:
            yield from _of_decay(step)
    elif step.role == "max_exp_avg_sq":
        yield from _of_maximum(step)
    else:
        yield from _of_moment(step)


def _of_moment(step: SegmentStep) -> Iterator[Change]:
    e, s = step.elements, step.scalars
    other = "exp_avg_sq" if step.role == "exp_avg" else "exp_avg"
    words = f"it is {other}, and not {step.role}"
    yield Change(bugs.MOMENTS_SWAPPED, words, partial(step.take, role=other))
    if s.weight_decay and not step.rule.couples_decay:
        term = s.weight_decay * e.parameter
        error = e.error + 3 * e.format.u * (e.gradient.abs() + term.abs()) + e.format.eta
        words = "with weight decay added to the gradient"
        yield step.change(
            bugs.L2_INSTEAD_OF_DECOUPLED, words, gradient=e.gradient + term, error=error
        )


def _of_maximum(step: SegmentStep) -> Iterator[Change]:
    e = step.elements
    for words, vector in (
        ("it is exp_avg_sq, and not the maximum", e.new["exp_avg_sq"]),
        (
            "with the old exp_avg_sq in place of the new one",
            torch.maximum(e.old["max_exp_avg_sq"], e.old["exp_avg_sq"]),
        ),
    ):
        yield Change.known("", words, Enclosure(vector, torch.zeros_like(vector)))


def _of_corrections(step: SegmentStep) -> Iterator[Change]:
    s, one = step.scalars, step.segment
    count = one.microbatches
    for cause, words, number in (
        (bugs.STEP_OFF_BY_1, "of the next step", one.step + 1),
        (bugs.STEP_OFF_BY_1, "of the step before", one.step - 1),
        (bugs.STEP_OFF_BY_2, "two steps on", one.step + 2),
        (bugs.STEP_OFF_BY_2, "two steps back", one.step - 2),
        (bugs.STEPS_COUNTED_FROM_0, "that count the steps of this run alone", one.since),
        (bugs.MICROBATCHES_COUNTED_AS_STEPS, "that count microbatches", one.step * count),
        (
            bugs.MICROBATCHES_COUNTED_AS_STEPS,
            "that count microbatches of this run",
            one.step + one.since * (count - 1),
        ),
    ):
        if number > 0 and number != one.step:
            yield step.change(cause, f"with bias corrections {words}", step.with_(step=number))
    neither = s._replace(correction1=1.0, correction2=1.0)
    yield step.change(bugs.NO_BIAS_CORRECTION, "without bias corrections", neither)
    for role, name in (("exp_avg", "correction1"), ("exp_avg_sq", "correction2")):
        words = f"without the bias correction of {role}"
        yield step.change(bugs.NO_BIAS_CORRECTION, words, s._replace(**{name: 1.0}))


def _of_moments(step: SegmentStep) -> Iterator[Change]:
    e = step.elements
    m, v = e.new["exp_avg"], e.new["exp_avg_sq"]
    for words, new in (
        ("with exp_avg and exp_avg_sq exchanged", {"exp_avg": v, "exp_avg_sq": m.abs()}),
        (
            "with the gradient in place of exp_avg",
            {"exp_avg": e.gradient, "exp_avg_sq": largest(e)},
        ),
        ("with exp_avg_sq in place of its maximum", {"exp_avg": m, "exp_avg_sq": v}),
    ):
        if "maximum" not in words or "max_exp_avg_sq" in e.new:
            yield step.change("", words, new=new)


def _of_eps(step: SegmentStep) -> Iterator[Change]:
    s, v = step.scalars, largest(step.elements)
    inside = partial(_divided, step, (v / s.correction2 + s.eps).sqrt())
    yield Change(bugs.EPS_INSIDE_THE_ROOT, "with eps inside of the root", inside)
    before = s._replace(eps=s.eps / sqrt(s.correction2))
    words = "with eps before the bias correction"
    yield step.change(bugs.EPS_BEFORE_THE_BIAS_CORRECTION, words, before)


def _divided(step: SegmentStep, denominator: torch.Tensor) -> Enclosure:
    """Update with another denominator: the roundings of bounds.parameter, and 3 more."""
    s, e = step.scalars, step.elements
    u, format = e.format.u, e.format
    decay = 0.0 if step.rule.couples_decay else s.weight_decay
    decayed = e.parameter * (1 - s.lr * decay)
    update = s.lr / s.correction1 * e.new["exp_avg"] / denominator
    error = 2 * u * decayed.abs() + (10 * u + s.extra) * update.abs()
    error = error + 2 * format.eta + ETA / denominator
    exact, bound = rounded(decayed - update, error, format)
    return Enclosure(exact, bound * SECOND_ORDER)


def _of_decay(step: SegmentStep) -> Iterator[Change]:
    s = step.scalars
    decay, kept = s.weight_decay, 1 - s.lr * s.weight_decay
    if s.correction1 != 1.0:
        by_step_size = s._replace(weight_decay=decay / s.correction1)
        cause = bugs.WEIGHT_DECAY_BY_THE_CORRECTED_STEP_SIZE
        words = "with weight decay times lr / correction1"
        yield step.change(cause, words, by_step_size, rounds=3)
    for cause, words, scalars in (
        (bugs.WEIGHT_DECAY_TWICE, "with weight decay before the update and after it", s),
        (
            bugs.WEIGHT_DECAY_AFTER_THE_UPDATE,
            "with weight decay after the update",
            s._replace(weight_decay=0.0),
        ),
    ):
        yield Change(cause, words, partial(_then_decayed, step, scalars, kept))


def _then_decayed(step: SegmentStep, scalars: bounds.Scalars, kept: float) -> Enclosure | None:
    made = step.take(scalars, rounds=3)
    return None if made is None else Enclosure(made.exact * kept, made.bound * abs(kept))
