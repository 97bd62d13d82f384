"""Error bounds of a step of AdamW.

No constant here is tuned: each counts roundings on the longest path of one term, over all the
kernels that torch has for it (for-loop, foreach, fused). What is computed on the way is changed in
place where nobody else has it: on a large model, memory for one more float64 vector costs more
than the operation.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from zerocheck_reference import half_ulp

from ...floating_point import ETA, FP32, Enclosure, Format, U, rounded
from ..specification import Reading


class Scalars(NamedTuple):
    """Hyperparameters and bias corrections of one step under one reading of the options.

    With the relative error that the reading's own arithmetic adds to the update.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    correction1: float
    correction2: float
    extra: float


def scalars(
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    reading: Reading,
) -> Scalars:
    """Compute bias corrections 1 - beta^t at step t >= 1.

    In double precision torch computes 1 - beta^t with a cancellation: 2^-53 / (1 - beta^t) relative
    each (half of it for the second, under the root), counted twice; it matters for betas near 1.
    Single precision rounds beta to fp32 and takes powf, which adds 2 u b^t / (1 - b^t) relative for
    each correction (half of it for the second, counted whole). A learning rate that is a tensor is
    the only one that is rounded ("single rate"); what is computed with it rounds as counted.

    A compiled step, and one with `capturable`, computes the corrections alone in fp32 ("single
    corrections"): the power of a beta that may be rounded first, (t + 2) u b^t, and at most 5 more
    roundings than are counted below: the difference, the learning rate, its quotient, the
    reciprocal of that, and the root.
    """
    if reading == "single rate":
        lr = _single(lr)
    if reading == "single":
        lr, beta1, beta2, eps, weight_decay = (
            _single(value) for value in (lr, beta1, beta2, eps, weight_decay)
        )
    correction1, correction2 = correction(beta1, step), correction(beta2, step)
    extra = 2.0**-52 * (1 / correction1 + 1 / (2 * correction2))
    if reading == "single":
        extra += 2 * U * ((1 - correction1) / correction1 + (1 - correction2) / correction2)
    if reading == "single corrections":
        powers = (1 - correction1) / correction1 + (1 - correction2) / correction2
        extra += (step + 2) * U * powers + 5 * U
    return Scalars(lr, beta1, beta2, eps, weight_decay, correction1, correction2, extra)


def _single(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def correction(beta: float, step: int) -> float:
    return 1.0 if beta == 0 else -math.expm1(step * math.log(beta))


def exp_avg(
    m: torch.Tensor,
    g: torch.Tensor,
    s: Scalars,
    g_error: torch.Tensor | float = 0.0,
    format: Format = FP32,
) -> Enclosure:
    """b1 m + (1 - b1) g, as multiply-add or as lerp.

    lerp m + w (g - m): the difference, the product and w are rounded: 3 u w |g - m|. Multiply-add:
    two roundings each of b1 m and (1 - b1) g. Then the sum: h. `g_error`: what is not known of g.

    In bf16 lerp is one operation, and adds nothing in u. Multiply-add is two, `mul_(b1)` and
    `add_(g, alpha=1 - b1)`: u b1 |m|, and u w |g|, as torch reads alpha in bf16.
    """
    w = 1 - s.beta1
    exact = s.beta1 * m
    exact += w * g
    lerp = (g - m).abs()
    lerp *= 3 * w
    q = 2 * s.beta1 * m.abs()
    q += 2 * w * g.abs()
    q = torch.maximum(lerp, q, out=q)
    q *= U
    q += 2 * format.eta + w * g_error
    if format.narrow:
        q += format.u * (s.beta1 * m.abs() + w * (g.abs() + g_error))
    return rounded(exact, q, format)


def exp_avg_sq(
    v: torch.Tensor,
    g: torch.Tensor,
    s: Scalars,
    g_error: torch.Tensor | float = 0.0,
    format: Format = FP32,
) -> Enclosure:
    """b2 v + (1 - b2) g^2: two roundings of the first term, three of the second, then the sum.

    In bf16 `mul_(b2)` is one operation, and `addcmul_` the other, whose own rounding is h. torch's
    `_foreach_mul_` reads b2 in bf16 too (0.999 is 1 there): 2 u b2 v.
    """
    w = 1 - s.beta2
    exact = w * g
    exact *= g
    exact += s.beta2 * v
    third = 3 * w * g
    third *= g
    q = 2 * s.beta2 * v.abs()
    q += third
    q *= U
    known = isinstance(g_error, float) and g_error == 0.0
    q += 2 * format.eta + (0.0 if known else w * g_error * (2 * g.abs() + g_error))
    if format.narrow:
        q += 2 * format.u * s.beta2 * v.abs()
    return rounded(exact, q, format)


def parameter(
    p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, s: Scalars, format: Format = FP32
) -> Enclosure:
    """p (1 - lr wd) - (lr / c1) m / (sqrt(v / c2) + eps), from the *observed* new m and v.

    v is max_exp_avg_sq with amsgrad. Decay: the factor and the product, 2 u. Update: step size,
    root, its division, eps, the division by the denominator and its product, 7 u on the longest
    path (two divisions may be reciprocals). lr m may underflow before the division: eta / den.

    In bf16 there are two forms. As operations: the decay, 2 u, since `_foreach_mul_` reads its
    factor in bf16; the root, its division, eps and (in torch's capturable form) the division by the
    step size each round the denominator, 4 u; addcdiv rounds at its end alone. Fused: all in fp32,
    but from m and v as they were before they were rounded to be stored, so that these are off by up
    to h each.
    """
    decayed = p * (1 - s.lr * s.weight_decay)
    denominator = (v / s.correction2).sqrt()
    denominator += s.eps
    update = s.lr / s.correction1 * m
    update /= denominator
    # 0 / 0 where neither a gradient nor eps ever was: torch gives NaN there too.
    q = (7 * U + s.extra) * update.abs()
    if format.narrow:
        q += torch.maximum(
            math.expm1(-4 * math.log1p(-format.u)) * update.abs(),
            _stored(m, v, s, format) - update.abs(),
        )
    if s.weight_decay != 0:
        q += 2 * format.u * decayed.abs()
    q += 2 * format.eta
    q += ETA / denominator
    return rounded(decayed - update, q, format)


def _stored(m: torch.Tensor, v: torch.Tensor, s: Scalars, format: Format) -> torch.Tensor:
    """Largest update that m and v can have given before they were rounded to be stored.

    It is farther from the update of the rounded ones than the smallest: the quotient is convex in v
    and the root concave. NaN and infinity become 0: there the update itself is none.
    """
    largest = m.abs() + half_ulp(m, format.dtype)
    least = (v - half_ulp(v, format.dtype)).clamp(min=0.0)
    update = s.lr / s.correction1 * largest / ((least / s.correction2).sqrt() + s.eps)
    return update.nan_to_num(nan=0.0, posinf=math.inf)
