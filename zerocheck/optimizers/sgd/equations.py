"""Lines of SGD's step as sums of terms, with inputs replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ..inputs import gradients
from ..specification import Equation, Segment


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
    for group, _ in segment.others:
        if group.weight_decay != s.weight_decay:
            found["weight_decay of another group"] = group.weight_decay
    return found


def _of_parameter(segment: Segment) -> Iterator[Equation]:
    """Parameter = parameter - lr (its direction)."""
    s, e = segment.scalars, segment.elements
    zero = torch.zeros_like(e.parameter)
    new, old = (of.get("momentum_buffer", zero) for of in (e.new, e.old))

    def line(words: str, gradient: torch.Tensor, buffer: torch.Tensor) -> Equation:
        terms = {"the parameter": e.parameter, "the gradient": gradient}
        direct = bool(not s.momentum or s.nesterov)
        right = {"the parameter": 1.0, "the gradient": -s.lr if direct else 0.0}
        if direct:
            right["the parameter"] = 1 - s.lr * s.weight_decay
        if s.momentum:
            terms["the buffer"] = buffer
            right["the buffer"] = -s.lr * (s.momentum if s.nesterov else 1.0)
        return Equation(
            words,
            terms,
            right,
            {
                "the parameter": _kept(segment),
                "the gradient": _rates(segment),
                "the buffer": _rates(segment),
            },
        )

    yield line("", e.gradient, new)
    if s.momentum:
        yield line("with the buffer from before this step", e.gradient, old)
    for words, gradient in gradients(segment):
        yield line(f"with {words} in place of the gradient", gradient, new)


def _kept(segment: Segment) -> Mapping[str, float]:
    s = segment.scalars
    decay = s.lr * s.weight_decay
    found = {
        "1": 1.0,
        "1 - lr * weight_decay": 1 - decay,
        "1 - 2 * lr * weight_decay (decayed twice)": 1 - 2 * decay,
        "(1 - lr * weight_decay)^2 (decayed twice)": (1 - decay) ** 2,
    }
    for group, rate in segment.others:
        if group.weight_decay != s.weight_decay or rate != s.lr:
            found["1 - lr * weight_decay of another group"] = 1 - rate * group.weight_decay
    return found


def _rates(segment: Segment) -> Mapping[str, float]:
    s = segment.scalars
    found = {
        "-lr": -s.lr,
        "0": 0.0,
        "-lr * momentum": -s.lr * s.momentum,
        "lr": s.lr,
        "-1 (without lr)": -1.0,
        "-lr * (1 + momentum)": -s.lr * (1 + s.momentum),
    }
    for rate in segment.rates:
        if rate != s.lr:
            found[f"-lr of another step ({rate:.6g})"] = -rate
            found[f"-lr * momentum with lr of another step ({rate:.6g})"] = -rate * s.momentum
    for _, rate in segment.others:
        if rate != s.lr:
            found["-lr of another group"] = -rate
    return found
