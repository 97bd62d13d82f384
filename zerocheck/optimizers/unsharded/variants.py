"""Further runs of the optimizer, each with one input or option changed, by cause or in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from ... import causes as bugs
from ...floating_point import Enclosure
from ..inputs import gradients
from ..specification import Segment
from . import step
from .step import UnshardedScalars

Named = Iterator[tuple[str, Enclosure]]


class Change(NamedTuple):
    """One change. cause: "" for none; made: encloses the role of the segment."""

    cause: str
    words: str
    made: Callable[[], Enclosure]


def variants(segment: Segment) -> Named:
    """Enclose the segment's role after a step with each known mistake: (cause, enclosure)."""
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
    for change in _changes(segment):
        yield change.cause, change.made()


def reruns(segment: Segment) -> Named:
    """Enclose the segment's role after a step with one thing changed: (in words, enclosure)."""
    for words, gradient in gradients(segment):
        yield f"with {words} in place of the gradient", _result(segment, gradient=gradient)
    negated = _result(segment, gradient=-segment.elements.gradient)
    yield "with the gradient of the other sign", negated
    for change in _changes(segment):
        yield change.words, change.made()


def _result(segment: Segment, scalars: UnshardedScalars | None = None, **inputs: Any) -> Enclosure:
    """Enclose the role of the segment with some inputs changed."""
    scalars = segment.scalars if scalars is None else scalars
    return step.enclosures(segment.elements, scalars, **inputs)[segment.role]


def _changes(segment: Segment) -> Iterator[Change]:
    yield from _of_options(segment)
    yield from _of_states(segment)


def _of_options(segment: Segment) -> Iterator[Change]:
    s: UnshardedScalars = segment.scalars
    run = partial(partial, _result, segment)
    decay = s.options.get("weight_decay", 0.0)
    if decay:
        without, twice = s.with_options(weight_decay=0.0), s.with_options(weight_decay=2 * decay)
        yield Change(bugs.WEIGHT_DECAY_MISSING, "without weight decay", run(without))
        yield Change(bugs.WEIGHT_DECAY_TWICE, "with weight decay twice", run(twice))
        yield Change(
            bugs.DECOUPLED_INSTEAD_OF_L2,
            "with weight decay decoupled from the gradient",
            partial(_decoupled, segment),
        )
    for rate in segment.rates:
        if rate != s.options["lr"]:
            yield Change(
                bugs.LEARNING_RATE_OF_ANOTHER_STEP,
                f"with lr of another step ({rate:.6g})",
                run(s.with_options(lr=rate)),
            )
    for group, rate in segment.others:
        changed = {
            "betas": (group.beta1, group.beta2),
            "rho": group.beta2,
            "alpha": group.beta2,
            "eps": group.eps,
            "weight_decay": group.weight_decay,
        }
        more = {name: value for name, value in changed.items() if name in s.options}
        for other, words in (
            (s.with_options(lr=rate), "lr"),
            (s.with_options(lr=rate, **more), "the options"),
        ):
            if other != s:
                words = f"with {words} of another group ({group.pattern!r})"
                yield Change(bugs.OPTIONS_OF_ANOTHER_GROUP, words, run(other))
    if "betas" in s.options:
        swapped = s.with_options(betas=s.options["betas"][::-1])
        yield Change(bugs.BETAS_SWAPPED, "with beta1 and beta2 exchanged", run(swapped))


def _decoupled(segment: Segment) -> Enclosure:
    """Enclose the step of a parameter that decay shrank first. Two more roundings of it."""
    s, e = segment.scalars, segment.elements
    kept = e.parameter * (1 - s.options["lr"] * s.options["weight_decay"])
    plain = s.with_options(weight_decay=0.0)
    exact, bound = step.enclosures(e._replace(parameter=kept), plain)[segment.role]
    return Enclosure(exact, bound + 3 * e.format.u * exact.abs())


def _of_states(segment: Segment) -> Iterator[Change]:
    s, old = segment.scalars, segment.elements.old
    if any(bool(state.any()) for state in old.values()):
        zeros = {role: torch.zeros_like(state) for role, state in old.items()}
        yield Change(bugs.MOMENTS_RESET, "with states of 0", partial(_result, segment, old=zeros))
    if s.taken and s.new_scalar_states:
        yield Change(
            bugs.SCALAR_STATE_LOST,
            f"with new {' and '.join(s.new_scalar_states)}, a state that is one number",
            partial(_result, segment, s._replace(scalar_states=s.new_scalar_states)),
        )
    for ahead, words in ((-1, "less"), (1, "more")) if s.taken else ():
        yield Change(
            bugs.STEP_COUNT,
            f"with a step count of one {words}",
            partial(_result, segment, s._replace(taken=s.taken + ahead)),
        )
