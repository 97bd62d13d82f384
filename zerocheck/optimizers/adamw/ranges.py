"""Exact range of an AdamW update whose moments are hidden, and the moments after it.

With m in [m-, m+] and v in [v-, v+] before a step, and a gradient g in [g-, g+], the update is

    F(a, b, g) = (lr / c1) (a + w g) / (sqrt(b + c g^2) + eps)

with a = b1 m, w = 1 - b1, b = b2 v / c2, c = (1 - b2) / c2. F grows with a; for given a and g it is
monotone in b, falling where a + w g > 0 and growing where it is below; in g it has one stationary
point, a c g = w (b + eps sqrt(b + c g^2)), of which the square is

    (a^2 c^2 - w^2 eps^2 c) g^2 - 2 a c w b g + w^2 b (b - eps^2) = 0.

So the range over the box is that over a at one end, b at both, and g at both ends and at the roots
of the square that lie between (a root that solves the square alone is a point of the interval like
any other, and widens nothing). Division of intervals, by contrast, forgets that numerator and
denominator have one g: where a gradient is small it is up to 4e7 times wider.

Moments are rounded where they are stored: by the bounds of `adamw.exp_avg` and `exp_avg_sq`, at
the largest sizes that they can have here, which widen [m-, m+] and [v-, v+] after the step too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from zerocheck_reference import half_ulp

from ...floating_point import ETA, SECOND_ORDER, Enclosure, U, rounded
from .bounds import Scalars

LEAST = 1e-300
"""In place of a denominator of 0."""


class Box(NamedTuple):
    """Enclosed moments and gradient of some elements, float64: middles and half widths."""

    m: torch.Tensor
    m_error: torch.Tensor
    v: torch.Tensor
    v_error: torch.Tensor
    g: torch.Tensor
    g_error: torch.Tensor


def update_range(box: Box, s: Scalars) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [low, high] of lr / c1 m' / (sqrt(v' / c2) + eps), moments rounded for storage."""
    m_round, v_round = _roundings(box, s)
    w, c = 1 - s.beta1, (1 - s.beta2) / s.correction2
    a, a_error = s.beta1 * box.m, s.beta1 * box.m_error + m_round
    b, b_error = s.beta2 * box.v / s.correction2, s.beta2 * box.v_error + v_round
    b_error = b_error / s.correction2
    low_g, high_g = box.g - box.g_error, box.g + box.g_error
    values: list[list[torch.Tensor]] = []
    for end in (a - a_error, a + a_error):
        found = []
        for root in ((b - b_error).clamp(min=0.0), b + b_error):
            for g in (low_g, high_g, *_stationary(end, root, w, c, s.eps, low_g, high_g)):
                denominator = ((root + c * g * g).sqrt() + s.eps).clamp(min=LEAST)
                found.append((end + w * g) / denominator)
        values.append(found)
    step = s.lr / s.correction1
    low = torch.stack(values[0]).amin(0) * step
    high = torch.stack(values[1]).amax(0) * step
    return (low, high) if step >= 0 else (high, low)


def _stationary(
    a: torch.Tensor,
    b: torch.Tensor,
    w: float,
    c: float,
    eps: float,
    low: torch.Tensor,
    high: torch.Tensor,
) -> Iterator[torch.Tensor]:
    """Return the roots of the square of the stationary condition, clamped to [low, high]."""
    square = a * a * c * c - w * w * eps * eps * c
    half = a * c * w * b
    rest = w * w * b * (b - eps * eps)
    spread = (half * half - square * rest).clamp(min=0.0).sqrt()
    for root in ((half + spread) / square, (half - spread) / square):
        yield torch.where(root.isfinite(), root.clamp(low, high), low)


def _roundings(box: Box, s: Scalars) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the round-off of the new moments, at the largest magnitudes in the box."""
    w1, w2 = 1 - s.beta1, 1 - s.beta2
    m = box.m.abs() + box.m_error
    v = box.v.abs() + box.v_error
    g = box.g.abs() + box.g_error
    m_q = U * torch.maximum(3 * w1 * (g + m), 2 * s.beta1 * m + 2 * w1 * g) + 2 * ETA
    v_q = U * (2 * s.beta2 * v + 3 * w2 * g * g) + 2 * ETA
    m_h = half_ulp(s.beta1 * m + w1 * g + m_q, torch.float32)
    v_h = half_ulp(s.beta2 * v + w2 * g * g + v_q, torch.float32)
    return SECOND_ORDER * (m_q + m_h), SECOND_ORDER * (v_q + v_h)


def moments_after(
    box: Box, s: Scalars
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return (middle, half width) of each moment after the step."""
    m_round, v_round = _roundings(box, s)
    w1, w2 = 1 - s.beta1, 1 - s.beta2
    m = s.beta1 * box.m + w1 * box.g
    m_error = s.beta1 * box.m_error + w1 * box.g_error + m_round
    v = s.beta2 * box.v + w2 * box.g * box.g
    error = box.g_error * (2 * box.g.abs() + box.g_error)
    v_error = s.beta2 * box.v_error + w2 * error + v_round
    return (m, m_error), (v, v_error)


def parameter_after(
    p: torch.Tensor, low: torch.Tensor, high: torch.Tensor, s: Scalars
) -> Enclosure:
    """Enclose the new parameter, with the roundings of `adamw.parameter`."""
    decayed = p * (1 - s.lr * s.weight_decay)
    largest = torch.maximum(low.abs(), high.abs())
    error = (high - low) / 2 + (7 * U + s.extra) * largest + 2 * ETA
    error = error + ETA * s.lr / s.correction1 / max(s.eps, LEAST)
    if s.weight_decay != 0:
        error = error + 2 * U * decayed.abs()
    return rounded(decayed - (low + high) / 2, error)
