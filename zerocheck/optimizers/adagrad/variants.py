"""Known causes of a wrong update of Adagrad and RMSprop: a step with one thing changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ... import causes as bugs
from ...floating_point import BF16, Enclosure, Format, U, all_inside
from ..coupled_decay import Direction
from ..inputs import other_rates, scaled
from ..specification import Segment
from . import bounds
from .bounds import SquareScalars, SquaresRule

Named = Iterator[tuple[str, Enclosure]]


def variants(segment: Segment, rule: SquaresRule) -> Named:
    """Enclose the result of the segment's role with each known mistake: (cause, enclosure)."""
    made = _Step(segment, rule)
    observed, format = segment.observed, segment.elements.format
    if not format.narrow and torch.equal(observed, observed.bfloat16().double()):
        yield bugs.ROUNDED_TO_BF16, made.result(format=BF16)
    if segment.role != "parameter" or not segment.scalars.momentum:
        yield from _of_gradients(segment, made)
        yield from _of_decay(segment, made)
    yield from _of_states(segment, made)
    yield from _of_options(segment, made)


class _Step:
    """Step of a segment, with some inputs changed."""

    def __init__(self, segment: Segment, rule: SquaresRule) -> None:
        self.segment, self.rule = segment, rule

    def result(
        self,
        s: SquareScalars | None = None,
        *,
        g: torch.Tensor | None = None,
        g_rounds: int = 0,
        old: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        b: torch.Tensor | None = None,
        format: Format | None = None,
    ) -> Enclosure:
        """Enclose the role of the segment.

        g: the gradient, with `g_rounds` roundings more; old: the state before the step; v, b: the
        new squares and the new buffer.
        """
        e, role = self.segment.elements, self.segment.role
        s, format = s or self.segment.scalars, format or e.format
        g = e.gradient if g is None else g
        d = bounds.direction(e.parameter, g, s, e.error + g_rounds * U * g.abs(), format)
        v = e.new[self.rule.squares] if v is None else v
        if role == self.rule.squares:
            return bounds.squares(e.old[role] if old is None else old, d, s, format)
        if role == "momentum_buffer":
            held = e.old[role] if old is None else old
            return bounds.momentum_buffer(held, d, v, s, format)
        if s.momentum:
            new = e.new["momentum_buffer"] if b is None else b
            return bounds.along_buffer(e.parameter, new, s, format)
        return bounds.parameter(e.parameter, d, v, s, format)

    def with_(self, **changed: float) -> Enclosure:
        """Enclose the role with other options."""
        return self.result(self.segment.scalars._replace(**changed))


def _of_gradients(segment: Segment, made: _Step) -> Named:
    g = segment.elements.gradient
    if segment.unclipped is not None:
        yield bugs.GRADIENT_BEFORE_CLIPPING, made.result(g=segment.unclipped)
    if segment.previous is not None and bool((segment.previous != g).any()):
        yield bugs.GRADIENT_OF_THE_PREVIOUS_STEP, made.result(g=segment.previous)
    for gradient in segment.in_memory:
        yield bugs.ELEMENTS_IN_MEMORY_ORDER, made.result(g=gradient)
    yield bugs.GRADIENT_WITH_THE_WRONG_SIGN, made.result(g=-g)
    for name, gradient in segment.gradients():
        if bool((gradient != g).any()):
            yield name, made.result(g=gradient, g_rounds=2 + segment.microbatches)


def _of_decay(segment: Segment, made: _Step) -> Named:
    decay = segment.scalars.weight_decay
    if decay:
        yield _without_decay(segment, made), made.with_(weight_decay=0.0)
        yield bugs.WEIGHT_DECAY_TWICE, made.with_(weight_decay=2 * decay)
    for group, _ in segment.others:
        if group.weight_decay != decay:
            name = bugs.OPTIONS_OF_ANOTHER_GROUP
            name = name if decay else bugs.WEIGHT_DECAY_ON_EXCLUDED_PARAMETERS
            yield name, made.with_(weight_decay=group.weight_decay)


def _without_decay(segment: Segment, made: _Step) -> str:
    """Return the cause of a missing decay: the parameter may have it decoupled."""
    after = segment.parameter_after
    if after is None or segment.role == "parameter":
        return bugs.WEIGHT_DECAY_MISSING
    last = _Step(segment._replace(role="parameter"), made.rule)
    plain = last.with_(weight_decay=0.0)
    if all_inside(after, plain) or not all_inside(after, _shrunk(segment, plain)):
        return bugs.WEIGHT_DECAY_MISSING
    return bugs.DECOUPLED_INSTEAD_OF_L2


def _shrunk(segment: Segment, plain: Enclosure) -> Enclosure:
    """Enclose a parameter that shrank by lr weight_decay, before a step; three more roundings."""
    e, s = segment.elements, segment.scalars
    less = s.lr * s.weight_decay * e.parameter
    error = 3 * e.format.u * (e.parameter.abs() + less.abs() + plain.exact.abs())
    return Enclosure(plain.exact - less, plain.bound + error)


def _of_states(segment: Segment, made: _Step) -> Named:
    e, s, role = segment.elements, segment.scalars, segment.role
    if role != "parameter":
        if bool(e.old[role].any()):
            yield bugs.MOMENTS_RESET, made.result(old=torch.zeros_like(e.old[role]))
    elif s.momentum:
        if bool(e.old["momentum_buffer"].any()):
            yield bugs.MOMENTS_OF_THE_PREVIOUS_STEP, made.result(b=e.old["momentum_buffer"])
        yield bugs.MOMENTUM_LEFT_OUT, made.with_(momentum=0.0)
        if s.weight_decay:
            yield bugs.WEIGHT_DECAY_TWICE, _shrunk(segment, made.result())
    if role != made.rule.squares and not (role == "parameter" and s.momentum):
        yield bugs.MOMENTS_OF_THE_PREVIOUS_STEP, made.result(v=e.old[made.rule.squares])
        v = e.new[made.rule.squares]
        inside = (v + s.eps).sqrt() - s.eps  # whose square with eps outside is v + eps inside
        made_inside = made.result(v=inside.clamp(min=0.0) ** 2)
        yield (
            bugs.EPS_INSIDE_THE_ROOT,
            Enclosure(
                made_inside.exact, made_inside.bound + 6 * e.format.u * made_inside.exact.abs()
            ),
        )
    if role == "parameter" and not s.momentum and s.weight_decay:
        yield bugs.WEIGHT_DECAY_TWICE, _shrunk(segment, made.result())


def _of_options(segment: Segment, made: _Step) -> Named:
    s, role = segment.scalars, segment.role
    if role == "parameter":
        for cause, _, rate in other_rates(segment):
            yield cause, made.with_(lr=rate)
        for option in scaled(segment, "weight_decay", "eps"):
            yield bugs.OPTION_SCALED, made.with_(**option)
    for group, rate in segment.others:
        of_group: dict[str, Any] = made.rule.weights_of(group)
        for other in (s._replace(lr=rate), s._replace(lr=rate, **of_group)):
            if other != s:
                yield bugs.OPTIONS_OF_ANOTHER_GROUP, made.result(other)
    if role == "momentum_buffer":
        n = bounds.quotient(
            _direction(segment),
            segment.elements.new[made.rule.squares],
            s,
            segment.elements.format,
            s.lr,
        )
        exact = s.momentum * segment.elements.old[role] + n.exact
        error = n.error + 4 * segment.elements.format.u * (exact.abs() + n.exact.abs())
        yield bugs.LEARNING_RATE_IN_THE_MOMENTUM, Enclosure(exact, error)


def _direction(segment: Segment) -> Direction:
    e = segment.elements
    return bounds.direction(e.parameter, e.gradient, segment.scalars, e.error, e.format)
