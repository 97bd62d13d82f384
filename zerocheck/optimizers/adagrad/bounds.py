"""Error bounds of a step of Adagrad and of RMSprop.

    d  = g + weight_decay p
    v' = a v + w d^2             Adagrad: a = w = 1; RMSprop: a = alpha, w = 1 - alpha
    n  = d / (sqrt(v') + eps)
    b' = mu b + n                with momentum, which RMSprop may have
    p' = p - lr n, or p - lr b'

torch computes the lines in this order (torch/optim/adagrad.py, rmsprop.py). For-loop: `add(p,
alpha=weight_decay)`, `mul_(a)`, `addcmul_(d, d, value=w)`, `sqrt`, `add_(eps)`, and `addcdiv_(d,
root, value=-lr)`. Foreach: the same, but Adagrad's `-lr` is multiplied into d first. Fused, of
Adagrad alone: all in one loop, in fp32. Scalars are read as fp32. No constant here is tuned: each
counts roundings on the longest path of one term. Underflow adds eta for each product.

In bf16 what stands between two operations is rounded to it, and foreach kernels read their scalars
in it; the fused kernel has d and v' from before they were rounded to be stored.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from zerocheck_reference import half_ulp

from ...floating_point import FP32, Enclosure, Format, U, rounded
from ..coupled_decay import Direction, decayed, product, stored


class SquareScalars(NamedTuple):
    """Hyperparameters of one step.

    kept, taken: factors of the old squares and of the new ones; 1 and 1 of Adagrad.
    """

    lr: float
    kept: float
    taken: float
    eps: float
    weight_decay: float
    momentum: float


def direction(
    p: torch.Tensor,
    g: torch.Tensor,
    s: SquareScalars,
    g_error: torch.Tensor | float = 0.0,
    format: Format = FP32,
) -> Direction:
    """Enclose d, as it enters all other lines."""
    return stored(decayed(p, g, s.weight_decay, g_error, format), s.weight_decay, format)


def squares(v: torch.Tensor, d: Direction, s: SquareScalars, format: Format = FP32) -> Enclosure:
    """a v + w d^2: two roundings of the first term, if a is not 1; three of the second (w, d^2 and
    their product), one if w is 1; then the sum: h. In bf16 `mul_(a)` is one operation, with a read
    in it: 2 u a v; `addcmul_` is the other, whose own rounding is h.
    """
    exact = s.kept * v + s.taken * d.exact * d.exact
    q = (3 if s.taken != 1 else 1) * U * s.taken * d.exact * d.exact
    q = q + s.taken * d.error * (2 * d.exact.abs() + d.error) + 2 * format.eta
    if s.kept != 1:
        narrow = 2 * format.u if format.narrow else 0.0
        q = q + (2 * U + narrow) * s.kept * v.abs()
    return rounded(exact, q, format)


def quotient(
    d: Direction, v: torch.Tensor, s: SquareScalars, format: Format, factor: float = 1.0
) -> Direction:
    """Enclose factor * n, from the *observed* new v.

    Root, eps, division, the factor and its product: 5 u; factor d may underflow before the
    division: eta / root. In bf16 the root, eps, and the factor and its product round in it: 4 u.
    """
    root = v.sqrt() + s.eps
    exact = factor * d.exact / root
    error = 5 * U * exact.abs() + abs(factor) * d.error / root + format.eta / root + format.eta
    if format.narrow:
        grown = math.expm1(-4 * math.log1p(-format.u))
        error = error + grown * (exact.abs() + abs(factor) * d.error / root)
        least = (v - half_ulp(v, format.dtype)).clamp(min=0.0).sqrt() + s.eps
        largest = abs(factor) * (d.exact.abs() + d.error) / least
        error = torch.maximum(error, (largest - exact.abs()).nan_to_num(posinf=math.inf))
    return Direction(exact, error)


def momentum_buffer(
    b: torch.Tensor, d: Direction, v: torch.Tensor, s: SquareScalars, format: Format = FP32
) -> Enclosure:
    """mu b + n. The scalar mu and its product: 2 u; in bf16 they round in it."""
    n = quotient(d, v, s, format)
    kept = s.momentum * b
    return rounded(kept + n.exact, product(kept, format) + n.error, format)


def parameter(
    p: torch.Tensor, d: Direction, v: torch.Tensor, s: SquareScalars, format: Format = FP32
) -> Enclosure:
    """p - lr n, from the *observed* new v."""
    n = quotient(d, v, s, format, s.lr)
    return rounded(p - n.exact, n.error, format)


def along_buffer(
    p: torch.Tensor, b: torch.Tensor, s: SquareScalars, format: Format = FP32
) -> Enclosure:
    """p - lr b', from the *observed* new b'. lr and its product: 2 u."""
    update = s.lr * b
    return rounded(p - update, product(update, format), format)
