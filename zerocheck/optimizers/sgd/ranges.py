"""Interval of a gradient that is recovered from what is observed, and of a buffer that is hidden.

A step of SGD is linear in all that it computes with, so that the range of each result is an
interval whose half width is the sum of the half widths, by their factors, and of the round-off at
the largest magnitudes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...floating_point import FP32, SECOND_ORDER, Enclosure, Format, U
from ..specification import Interval
from . import bounds
from .bounds import SGDScalars


def recovered(
    old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor], s: SGDScalars, format: Format
) -> Interval:
    """Recover the gradient of a step.

    With momentum: b' = mu b + g + wd p   =>   g = b' - mu b - wd p +- E, with E the enclosure of
    the buffer. Without: p' = p - lr (g + wd p)   =>   g = (p - p') / lr - wd p +- E / lr, with E
    that of the parameter, which is wide where lr is small. With lr 0 nothing is known.

    g is kept in fp32: U. E is computed for the recovered g; that of the true one is larger by at
    most 2 u of what is unknown.
    """
    p = old["parameter"]
    zero = torch.zeros_like(p)
    if s.momentum:
        b = old["momentum_buffer"]
        g = new["momentum_buffer"] - s.momentum * b - s.weight_decay * p
        unknown = bounds.momentum_buffer(p, b, g, s, format=format).bound
    elif s.lr == 0:
        return Interval(zero, torch.full_like(p, torch.inf))
    else:
        g = (p - new["parameter"]) / s.lr - s.weight_decay * p
        unknown = bounds.parameter(p, zero, g, s, format=format).bound / abs(s.lr)
    unknown = unknown / (1 - 4 * format.u) + U * g.abs()
    return Interval(g, unknown * SECOND_ORDER)


def parameter_after(
    p: torch.Tensor, buffer: Interval, gradient: Interval, s: SGDScalars
) -> Enclosure:
    """Enclose the next parameter, where the buffer before is known as an interval."""
    after = buffer_after(p, buffer, gradient, s)
    g = gradient
    made = bounds.parameter(p, after.middle, g.middle, s, g.error)
    if not s.momentum:
        return made
    factor = s.momentum if s.nesterov else 1.0
    return Enclosure(
        made.exact, made.bound + abs(s.lr) * factor * (1 + 8 * U) * after.error * SECOND_ORDER
    )


def buffer_after(p: torch.Tensor, buffer: Interval, gradient: Interval, s: SGDScalars) -> Interval:
    """Enclose the buffer after a step."""
    made = bounds.momentum_buffer(p, buffer.middle, gradient.middle, s, gradient.error, FP32)
    width = s.momentum * buffer.error * (1 + 4 * U)
    # Of a buffer that is 0 in the middle the roundings are not counted there.
    more = 4 * U * (made.exact.abs() + made.bound) * (buffer.middle == 0)
    return Interval(made.exact, made.bound + width + more)
