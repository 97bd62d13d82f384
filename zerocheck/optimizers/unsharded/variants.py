"""Known causes of a wrong update, each as one more run of the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ... import causes as bugs
from ...floating_point import Enclosure
from ..specification import Segment
from . import step
from .step import UnshardedScalars

Named = Iterator[tuple[str, Enclosure]]


def variants(segment: Segment) -> Named:
    """Enclose the segment's role after a step with each known mistake: (cause, enclosure)."""
    yield from _of_gradients(segment)
    yield from _of_options(segment)
    yield from _of_states(segment)


def _result(segment: Segment, scalars: UnshardedScalars | None = None, **inputs: Any) -> Enclosure:
    """Enclose the role of the segment with some inputs changed."""
    scalars = segment.scalars if scalars is None else scalars
    return step.enclosures(segment.elements, scalars, **inputs)[segment.role]


def _of_gradients(segment: Segment) -> Named:
    g = segment.elements.gradient
    others = [
        (bugs.GRADIENT_BEFORE_CLIPPING, segment.unclipped),
        (bugs.GRADIENT_OF_THE_PREVIOUS_STEP, segment.previous),
        *((bugs.ELEMENTS_IN_MEMORY_ORDER, one) for one in segment.in_memory),
        (bugs.GRADIENT_WITH_THE_WRONG_SIGN, -g),
        *segment.gradients(),
    ]
    for cause, gradient in others:
        if gradient is not None and bool((gradient != g).any()):
            yield cause, _result(segment, gradient=gradient)


def _of_options(segment: Segment) -> Named:
    s: UnshardedScalars = segment.scalars
    decay = s.options.get("weight_decay", 0.0)
    if decay:
        yield bugs.WEIGHT_DECAY_MISSING, _result(segment, s.with_options(weight_decay=0.0))
        yield bugs.WEIGHT_DECAY_TWICE, _result(segment, s.with_options(weight_decay=2 * decay))
        yield bugs.DECOUPLED_INSTEAD_OF_L2, _decoupled(segment)
    for rate in segment.rates:
        if rate != s.options["lr"]:
            yield bugs.LEARNING_RATE_OF_ANOTHER_STEP, _result(segment, s.with_options(lr=rate))
    for group, rate in segment.others:
        changed = {
            "betas": (group.beta1, group.beta2),
            "rho": group.beta2,
            "alpha": group.beta2,
            "eps": group.eps,
            "weight_decay": group.weight_decay,
        }
        more = {name: value for name, value in changed.items() if name in s.options}
        for other in (s.with_options(lr=rate), s.with_options(lr=rate, **more)):
            if other != s:
                yield bugs.OPTIONS_OF_ANOTHER_GROUP, _result(segment, other)
    if "betas" in s.options:
        swapped = s.with_options(betas=s.options["betas"][::-1])
        yield bugs.BETAS_SWAPPED, _result(segment, swapped)


def _decoupled(segment: Segment) -> Enclosure:
    """Enclose the step of a parameter that decay shrank first. Two more roundings of it."""
    s, e = segment.scalars, segment.elements
    kept = e.parameter * (1 - s.options["lr"] * s.options["weight_decay"])
    plain = s.with_options(weight_decay=0.0)
    exact, bound = step.enclosures(e._replace(parameter=kept), plain)[segment.role]
    return Enclosure(exact, bound + 3 * e.format.u * exact.abs())


def _of_states(segment: Segment) -> Named:
    s, old = segment.scalars, segment.elements.old
    if any(bool(state.any()) for state in old.values()):
        zeros = {role: torch.zeros_like(state) for role, state in old.items()}
        yield bugs.MOMENTS_RESET, _result(segment, old=zeros)
    if s.taken and s.new_scalar_states:
        yield (
            bugs.SCALAR_STATE_LOST,
            _result(segment, s._replace(scalar_states=s.new_scalar_states)),
        )
    for ahead in (-1, 1) if s.taken else ():
        yield bugs.STEP_COUNT, _result(segment, s._replace(taken=s.taken + ahead))
