"""Lines of a step of Adagrad and RMSprop as sums of terms, with inputs replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ..inputs import factors, gradients, rates
from ..specification import Equation, Segment
from .bounds import SquaresRule


def equations(segment: Segment, rule: SquaresRule) -> Iterator[Equation]:
    """Iterate over the line that gives the segment's role, the right one first."""
    if segment.role == rule.squares:
        yield from _of_squares(segment, rule)
    elif segment.role == "momentum_buffer":
        yield from _of_buffer(segment, rule)
    else:
        yield from _of_parameter(segment, rule)


def _directions(segment: Segment) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the gradient with its decay, the right one first, and over others in words."""
    e, decay = segment.elements, segment.scalars.weight_decay
    yield "", e.gradient + decay * e.parameter
    for words, gradient in gradients(segment):
        yield f"with {words} in place of the gradient", gradient + decay * e.parameter
    others = [(f" of another group ({g.pattern!r})", g.weight_decay) for g, _ in segment.others]
    for words, other in (
        ("no weight decay", 0.0),
        ("twice the weight decay", 2 * decay),
        *((f"weight_decay{of}", other) for of, other in others),
    ):
        if other != decay:
            yield f"with {words} in the gradient", e.gradient + other * e.parameter


def _of_squares(segment: Segment, rule: SquaresRule) -> Iterator[Equation]:
    """Squares = kept old squares + taken gradient^2."""
    s, old = segment.scalars, segment.elements.old[rule.squares]
    kept, taken = {"1": 1.0, "0": 0.0}, {"1": 1.0, "0": 0.0, "lr": s.lr}
    if s.kept != 1:
        kept |= {"alpha": s.kept, "1 - alpha": 1 - s.kept}
        taken |= {"1 - alpha": s.taken, "alpha": s.kept}
    for group, _ in segment.others if s.kept != 1 else ():
        of_group = rule.weights_of(group)
        name = f"of another group ({group.pattern!r})"
        kept[f"alpha {name}"], taken[f"1 - alpha {name}"] = of_group["kept"], of_group["taken"]
    for words, d in _directions(segment):
        yield Equation(
            words,
            {"the old squares": old, "the square of the gradient": d * d},
            {"the old squares": s.kept, "the square of the gradient": s.taken},
            {"the old squares": kept, "the square of the gradient": taken},
        )


def _quotients(segment: Segment, rule: SquaresRule) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the gradient by the root, the right one first, and over others in words."""
    s, e = segment.scalars, segment.elements
    v, old = e.new[rule.squares], e.old[rule.squares]
    for words, d in _directions(segment):
        yield words, d / (v.sqrt() + s.eps)
    d = e.gradient + s.weight_decay * e.parameter
    yield "with squares from before this step", d / (old.sqrt() + s.eps)
    yield "with eps inside of the root", d / (v + s.eps).sqrt()
    for words, factor in factors(segment):
        yield f"with eps {words}", d / (v.sqrt() + s.eps * factor)
    yield "without eps", d / v.sqrt().clamp(min=1e-300)
    for group, _ in segment.others:
        if group.eps != s.eps:
            yield f"with eps of another group ({group.pattern!r})", d / (v.sqrt() + group.eps)


def _of_buffer(segment: Segment, rule: SquaresRule) -> Iterator[Equation]:
    """Buffer = momentum old buffer + gradient / (root + eps)."""
    s, old = segment.scalars, segment.elements.old["momentum_buffer"]
    for words, n in _quotients(segment, rule):
        yield Equation(
            words,
            {"the old buffer": old, "the update": n},
            {"the old buffer": s.momentum, "the update": 1.0},
            {
                "the old buffer": {"momentum": s.momentum, "0": 0.0, "1": 1.0},
                "the update": {"1": 1.0, "0": 0.0, "1 - momentum": 1 - s.momentum, "lr": s.lr},
            },
        )


def _of_parameter(segment: Segment, rule: SquaresRule) -> Iterator[Equation]:
    """Parameter = parameter - lr update."""
    s, e = segment.scalars, segment.elements
    lines: list[tuple[str, torch.Tensor]] = []
    if s.momentum:
        lines = [
            ("", e.new["momentum_buffer"]),
            ("with the buffer from before this step", e.old["momentum_buffer"]),
        ]
        without = (
            f"without momentum{', ' * bool(words)}{words}" for words, _ in _quotients(segment, rule)
        )
        lines += zip(without, (n for _, n in _quotients(segment, rule)), strict=True)
    else:
        lines = list(_quotients(segment, rule))
    for words, along in lines:
        yield Equation(
            words,
            {"the parameter": e.parameter, "the update": along},
            {"the parameter": 1.0, "the update": -s.lr},
            {
                "the parameter": {
                    "1": 1.0,
                    "1 - lr * weight_decay (decayed twice)": 1 - s.lr * s.weight_decay,
                },
                "the update": _rates(segment),
            },
        )


def _rates(segment: Segment) -> Mapping[str, float]:
    """Return the coefficients that the update may have."""
    s = segment.scalars
    found = {
        "-lr": -s.lr,
        "0 (no update)": 0.0,
        "lr (the wrong sign)": s.lr,
        "-2 * lr (updated twice)": -2 * s.lr,
        "-1 (without lr)": -1.0,
    }
    return found | rates(segment, "-lr", -1.0)
