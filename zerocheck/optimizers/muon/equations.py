"""Lines of Muon's step as sums of terms, with inputs replaced."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from zerocheck_reference import adjusted, orthogonalized
from zerocheck_reference.muon import EPS

from ...case.schema import Group
from ..inputs import factors, gradients, rates
from ..specification import Equation, Segment
from . import bounds
from .variants import ITERATIONS, PARTS_OF_A_FUSED_MATRIX

UPDATE = "the orthogonalized update"


def _of(group: Group) -> str:
    return f"({group.pattern!r})"


def equations(segment: Segment) -> Iterator[Equation]:
    """Iterate over the line that gives the segment's role, the right one first."""
    if segment.role == "momentum_buffer":
        yield from _of_buffer(segment)
    else:
        yield from _of_parameter(segment)


def _of_buffer(segment: Segment) -> Iterator[Equation]:
    """Buffer = momentum buffer + (1 - momentum) gradient."""
    s, e = segment.scalars, segment.elements
    mu = s.momentum

    def line(words: str, gradient: torch.Tensor) -> Equation:
        return Equation(
            words,
            {
                "the old buffer": e.old["momentum_buffer"],
                "the gradient": gradient,
                "the parameter": e.parameter,
            },
            {"the old buffer": mu, "the gradient": 1 - mu, "the parameter": 0.0},
            {
                "the old buffer": {"momentum": mu, "0": 0.0, "1": 1.0, "1 - momentum": 1 - mu},
                "the gradient": {
                    "1 - momentum": 1 - mu,
                    "1 (not dampened)": 1.0,
                    "0": 0.0,
                    "-(1 - momentum)": mu - 1,
                    "momentum": mu,
                },
                "the parameter": {
                    "0": 0.0,
                    "weight_decay": s.weight_decay,
                    "(1 - momentum) * weight_decay": (1 - mu) * s.weight_decay,
                },
            },
        )

    yield line("", e.gradient)
    for words, gradient in gradients(segment):
        yield line(f"with {words} in place of the gradient", gradient)
    right = mu * e.old["momentum_buffer"] + (1 - mu) * e.gradient
    divided = right / max(float(right.norm()), EPS)
    name = "the new buffer over its norm"
    yield Equation("it is the new buffer divided by its norm", {name: divided}, {name: 1.0}, {})


def _of_parameter(segment: Segment) -> Iterator[Equation]:
    """Parameter = (1 - lr weight_decay) parameter - lr r (the orthogonalized direction)."""
    s, e = segment.scalars, segment.elements
    new, old = e.new["momentum_buffer"], e.old["momentum_buffer"]

    def line(words: str, update: torch.Tensor) -> Equation:
        decay = s.lr * s.weight_decay
        return Equation(
            words,
            {"the parameter": e.parameter, UPDATE: update.reshape(-1).double()},
            {"the parameter": 1 - decay, UPDATE: -s.lr * adjusted(e.shape, s.adjustment)},
            {"the parameter": _kept(segment), UPDATE: _rates(segment)},
        )

    d = bounds.direction(e, new, s)
    yield line("", orthogonalized(d, steps=s.ns_steps))
    for count in dict.fromkeys(segment.ranks):
        for dim in range(len(e.shape)):
            parts = d.chunk(count, dim)
            if len(parts) > 1:
                apart = [orthogonalized(one, steps=s.ns_steps) for one in parts]
                words = f"orthogonalized shard by shard, {len(parts)} along dim {dim}"
                yield line(words, torch.cat(apart, dim))
    for number in PARTS_OF_A_FUSED_MATRIX:
        if e.shape[0] % number == 0 and e.shape[0] > number:
            apart = [orthogonalized(one, steps=s.ns_steps) for one in d.chunk(number)]
            yield line(f"orthogonalized in {number} parts along dim 0", torch.cat(apart))
    for steps in ITERATIONS:
        yield line(f"orthogonalized by {steps} iterations", orthogonalized(d, steps=steps))
    yield line("without orthogonalization", d)
    fp32 = orthogonalized(d, steps=s.ns_steps, dtype=torch.float32)
    yield line("orthogonalized in fp32, and not in bf16", fp32)
    other = s._replace(nesterov=not s.nesterov)
    form = "in Nesterov's form, which is not asked for"
    if s.nesterov:
        form = "in the form of plain momentum, and not in Nesterov's"
    yield line(form, orthogonalized(bounds.direction(e, new, other), steps=s.ns_steps))
    along = bounds.as_matrix(e, e.gradient)
    yield line(
        "along the gradient, and not along the momentum buffer",
        orthogonalized(along, steps=s.ns_steps),
    )
    stale = bounds.direction(e, old, s)
    words = "with the momentum buffer from before this step"
    yield line(words, orthogonalized(stale, steps=s.ns_steps))


def _kept(segment: Segment) -> Mapping[str, float]:
    """Return the coefficients that the parameter may have."""
    s = segment.scalars
    decay = s.lr * s.weight_decay
    factor = adjusted(segment.elements.shape, s.adjustment)
    found = {
        "1 - lr * weight_decay": 1 - decay,
        "1 (no weight decay)": 1.0,
        "(1 - lr * weight_decay)^2 (decayed twice)": (1 - decay) ** 2,
        "1 - lr * r * weight_decay (with the adjusted learning rate)": 1 - decay * factor,
        "1 - weight_decay (without lr)": 1 - s.weight_decay,
    }
    for words, factor in factors(segment) if decay else ():
        found[f"1 - lr * weight_decay with weight_decay {words}"] = 1 - decay * factor
    for group, rate in segment.others:
        found[f"1 - lr * weight_decay of another group {_of(group)}"] = (
            1 - rate * group.weight_decay
        )
        found[f"1 - lr * (weight_decay of another group) {_of(group)}"] = (
            1 - s.lr * group.weight_decay
        )
    return found


def _rates(segment: Segment) -> Mapping[str, float]:
    """Return the coefficients that the update may have, r being the factor of the shape."""
    s, (rows, columns) = segment.scalars, segment.elements.shape[-2:]
    right = adjusted((rows, columns), s.adjustment)
    found = {
        "-lr * r": -s.lr * right,
        "0 (no update)": 0.0,
        "lr * r (the wrong sign)": s.lr * right,
        "-lr (without r)": -s.lr,
        "-r (without lr)": -right,
        "-lr * sqrt(max(1, rows / columns))": -s.lr * math.sqrt(max(1, rows / columns)),
        "-lr * 0.2 sqrt(max(rows, columns))": -s.lr * 0.2 * math.sqrt(max(rows, columns)),
        "-lr * r of the transposed matrix": -s.lr * adjusted((columns, rows), s.adjustment),
    }
    for count in dict.fromkeys(segment.ranks):
        for dim in (0, 1):
            shape = [rows, columns]
            shape[dim] = -(-shape[dim] // count)
            factor = adjusted((shape[0], shape[1]), s.adjustment)
            found.setdefault(f"-lr * r of a shard (of {count}, dim {dim})", -s.lr * factor)
    return found | rates(segment, "-lr * r", -right)
