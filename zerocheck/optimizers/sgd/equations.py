"""Lines of SGD's step as sums of terms, with inputs replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ...case.schema import Group
from ..inputs import factors, gradients, rates
from ..specification import Equation, Segment


def _of(group: Group) -> str:
    return f"({group.pattern!r})"


def equations(segment: Segment) -> Iterator[Equation]:
    """Iterate over the line that gives the segment's role, the right one first."""
    if segment.role == "momentum_buffer":
        yield from _of_buffer(segment)
    else:
        yield from _of_parameter(segment)


def _of_buffer(segment: Segment) -> Iterator[Equation]:
    """Buffer = momentum buffer + gradient + weight_decay parameter."""
    s, e = segment.scalars, segment.elements

    def line(words: str, gradient: torch.Tensor) -> Equation:
        terms = {
            "the old buffer": e.old["momentum_buffer"],
            "the gradient": gradient,
            "the parameter": e.parameter,
        }
        right = {
            "the old buffer": s.momentum,
            "the gradient": 1.0,
            "the parameter": s.weight_decay,
        }
        gradient_ = {
            "1": 1.0,
            "0": 0.0,
            "1 - momentum": 1 - s.momentum,
            "lr": s.lr,
            "-1": -1.0,
        }
        old = {"momentum": s.momentum, "0": 0.0, "1": 1.0}
        return Equation(
            words,
            terms,
            right,
            {"the old buffer": old, "the gradient": gradient_, "the parameter": _decays(segment)},
        )

    yield line("", e.gradient)
    for words, gradient in gradients(segment):
        yield line(f"with {words} in place of the gradient", gradient)


def _decays(segment: Segment) -> Mapping[str, float]:
    s = segment.scalars
    found = {
        "weight_decay": s.weight_decay,
        "0 (no weight decay)": 0.0,
        "2 * weight_decay (decayed twice)": 2 * s.weight_decay,
        "(1 - momentum) * weight_decay": (1 - s.momentum) * s.weight_decay,
        "lr * weight_decay": s.lr * s.weight_decay,
    }
    for words, factor in factors(segment) if s.weight_decay else ():
        found[f"weight_decay {words}"] = s.weight_decay * factor
    for group, _ in segment.others:
        if group.weight_decay != s.weight_decay:
            found[f"weight_decay of another group {_of(group)}"] = group.weight_decay
    return found


def _of_parameter(segment: Segment) -> Iterator[Equation]:
    """Parameter = parameter - lr (its direction)."""
    s, e = segment.scalars, segment.elements
    zero = torch.zeros_like(e.parameter)
    new, old = (of.get("momentum_buffer", zero) for of in (e.new, e.old))

    def line(words: str, direction: torch.Tensor) -> Equation:
        return Equation(
            words,
            {"the parameter": e.parameter, "the update": direction},
            {"the parameter": 1.0, "the update": -s.lr},
            {"the parameter": _kept(segment), "the update": _rates(segment)},
        )

    def form(gradient: torch.Tensor, buffer: torch.Tensor, *, nesterov: bool) -> torch.Tensor:
        decayed: torch.Tensor = gradient + s.weight_decay * e.parameter
        if not s.momentum:
            return decayed
        return decayed + s.momentum * buffer if nesterov else buffer

    yield line("", form(e.gradient, new, nesterov=s.nesterov))
    if s.momentum:
        other = "in Nesterov's form, which is not asked for"
        if s.nesterov:
            other = "in the form of plain momentum, and not in Nesterov's"
        yield line(other, form(e.gradient, new, nesterov=not s.nesterov))
        yield line(
            "along the gradient, and not along the momentum buffer",
            e.gradient + s.weight_decay * e.parameter,
        )
        yield line(
            "with the momentum buffer from before this step",
            form(e.gradient, old, nesterov=s.nesterov),
        )
    for words, gradient in gradients(segment):
        taken = form(gradient, new, nesterov=s.nesterov)
        yield line(f"with {words} in place of the gradient", taken)


def _kept(segment: Segment) -> Mapping[str, float]:
    """Return the coefficients that the parameter may have; the update has weight decay in it."""
    s = segment.scalars
    decay = s.lr * s.weight_decay
    found = {"1": 1.0}
    if decay:
        found["1 - lr * weight_decay (decayed twice)"] = 1 - decay
        found["1 + lr * weight_decay (no weight decay)"] = 1 + decay
    for group, rate in segment.others:
        change = s.weight_decay - group.weight_decay
        if change:
            found[f"1 + lr * (weight_decay - that of another group) {_of(group)}"] = (
                1 + s.lr * change
            )
            found[
                f"1 + lr * (weight_decay - that of another group), lr of that group {_of(group)}"
            ] = 1 + rate * change
    return found


def _rates(segment: Segment) -> Mapping[str, float]:
    s = segment.scalars
    found = {
        "-lr": -s.lr,
        "0 (no update)": 0.0,
        "lr (the wrong sign)": s.lr,
        "-1 (without lr)": -1.0,
        "-2 * lr (updated twice)": -2 * s.lr,
    }
    return found | rates(segment, "-lr", -1.0)
