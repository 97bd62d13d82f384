"""The bounds of the judge: how far a correct fp32 execution can land from the exact result.

The standard model of rounding (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
section 2.2): fl(a op b) = (a op b)(1 + d) + e with |d| <= u and |e| <= eta; u = 2^-24 and eta =
2^-149 for fp32. `h(x)` is half the spacing at |x|: what the last rounding can do, taken at |exact|
plus all other error terms, since a binade can be crossed. Every bound is first order, times
SECOND_ORDER. Everything is computed in float64, whose own round-off is 2^-29 of fp32's.

No constant here is tuned: each counts roundings on the longest path of one term, over all the
kernels that torch has for it (for-loop, foreach, fused).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch

from zerocheck_reference import half_ulp, smallest_subnormal, unit_roundoff

U = unit_roundoff(torch.float32)
ETA = smallest_subnormal(torch.float32)
SECOND_ORDER = 1 + 1e-6
"""Products of two roundings are at most (30 u)^2 / u < 1e-4 u; 1e-6 relative covers them."""

Reading = Literal["double", "single"]
"""How an optimizer reads its hyperparameters: as Python's doubles, or rounded to fp32 first."""
READINGS: tuple[Reading, ...] = ("double", "single")


class Enclosure(NamedTuple):
    """Per element, [exact - bound, exact + bound], float64."""

    exact: torch.Tensor
    bound: torch.Tensor


def rounded(exact: torch.Tensor, error: torch.Tensor) -> Enclosure:
    """The enclosure of a result that is stored in fp32, after `error` has accumulated."""
    last = half_ulp(exact.abs() + error, torch.float32)
    return Enclosure(exact, (error + last) * SECOND_ORDER)


def gradient_roundings(
    *, world_size: int, microbatches: int, average: str, divide: str, accumulate: str
) -> int:
    """K: how many roundings the path of one term g_rm has to the reduced gradient.

    A sum of N + M - 1 terms in any order rounds each term at most (N - 1) + (M - 1) times. Division
    by N is exact for a power of two; otherwise one division, or a multiplication by fl(1/N), which
    is rounded itself: 2. The same for 1/M where the gradient is divided and not the loss. With
    `reduce_each` each microbatch is reduced and divided, then added.
    """
    scale = 0 if average == "sum" else _roundings_of_division(world_size)
    if divide == "gradient":
        scale += _roundings_of_division(microbatches)
    if accumulate == "reduce_each":
        return microbatches * (world_size - 1 + scale) + microbatches - 1
    return (world_size - 1) + (microbatches - 1) + scale


def _roundings_of_division(count: int) -> int:
    return 0 if count & (count - 1) == 0 else 2


def gradient(exact: torch.Tensor, absolute: torch.Tensor, roundings: int) -> Enclosure:
    """K u / (1 - K u) * sum |g_rm| / N + K eta (Higham, section 4.2: any order of summation).

    exact: sum of g_rm / N; absolute: sum of |g_rm| / N; both float64.
    """
    ku = roundings * U
    return Enclosure(exact, (ku / (1 - ku) * absolute + roundings * ETA) * SECOND_ORDER)


def norm_relative(elements: int) -> float:
    """Relative error of a 2-norm of `elements` numbers, summed in any order and any grouping.

    n - 1 additions and one product round the sum of squares by at most n u; the root halves it.
    Grouped norms (per tensor, then per rank) round once more at each of their roots and products:
    4 u. torch's own fp32 norm is thousands of u off on large tensors, within this bound.
    """
    return U * (elements / 2 + 4) * SECOND_ORDER


def clipped(gradient_: torch.Tensor, coefficient: float) -> Enclosure:
    """The gradient times the coefficient, given the reported norm.

    4 u: one addition of eps, a division that may be a reciprocal times the numerator (2), the cast
    of the numerator. Then the product is rounded: h. eta where it is subnormal.
    """
    exact = gradient_ * coefficient
    return rounded(exact, 4 * U * exact.abs() + ETA)


class Scalars(NamedTuple):
    """Hyperparameters and bias corrections of one step under one reading, and the relative error
    that the reading's own arithmetic adds to the update."""

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
    """Bias corrections 1 - beta^t at step t >= 1.

    In double precision torch computes 1 - beta^t with a cancellation: 2^-53 / (1 - beta^t) relative
    each (half of it for the second, under the root), counted twice; it matters for betas near 1.
    Single precision rounds beta to fp32 and takes powf, which adds 2 u b^t / (1 - b^t) relative for
    each correction (half of it for the second, counted whole).
    """
    if reading == "single":
        lr, beta1, beta2, eps, weight_decay = (
            _single(value) for value in (lr, beta1, beta2, eps, weight_decay)
        )
    correction1, correction2 = correction(beta1, step), correction(beta2, step)
    extra = 2.0**-52 * (1 / correction1 + 1 / (2 * correction2))
    if reading == "single":
        extra += 2 * U * ((1 - correction1) / correction1 + (1 - correction2) / correction2)
    return Scalars(lr, beta1, beta2, eps, weight_decay, correction1, correction2, extra)


def _single(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def correction(beta: float, step: int) -> float:
    return 1.0 if beta == 0 else -math.expm1(step * math.log(beta))


def exp_avg(
    m: torch.Tensor, g: torch.Tensor, s: Scalars, g_error: torch.Tensor | float = 0.0
) -> Enclosure:
    """b1 m + (1 - b1) g, as multiply-add or as lerp.

    lerp m + w (g - m): the difference, the product and w are rounded: 3 u w |g - m|. Multiply-add:
    two roundings each of b1 m and (1 - b1) g. Then the sum: h. `g_error`: what is not known of g.
    """
    w = 1 - s.beta1
    exact = s.beta1 * m + w * g
    q = U * torch.maximum(3 * w * (g - m).abs(), 2 * s.beta1 * m.abs() + 2 * w * g.abs()) + (
        2 * ETA + w * g_error
    )
    return rounded(exact, q)


def exp_avg_sq(
    v: torch.Tensor, g: torch.Tensor, s: Scalars, g_error: torch.Tensor | float = 0.0
) -> Enclosure:
    """b2 v + (1 - b2) g^2: two roundings of the first term, three of the second, then the sum."""
    w = 1 - s.beta2
    exact = s.beta2 * v + w * g * g
    q = U * (2 * s.beta2 * v.abs() + 3 * w * g * g) + (
        2 * ETA + w * g_error * (2 * g.abs() + g_error)
    )
    return rounded(exact, q)


def parameter(p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, s: Scalars) -> Enclosure:
    """p (1 - lr wd) - (lr / c1) m / (sqrt(v / c2) + eps), from the *observed* new m and v.

    v is max_exp_avg_sq with amsgrad. Decay: the factor and the product, 2 u. Update: step size,
    root, its division, eps, the division by the denominator and its product, 7 u on the longest
    path (two divisions may be reciprocals). lr m may underflow before the division: eta / den.
    """
    decayed = p * (1 - s.lr * s.weight_decay)
    denominator = (v / s.correction2).sqrt() + s.eps
    update = s.lr / s.correction1 * m / denominator
    # 0 / 0 where neither a gradient nor eps ever was: torch gives NaN there too.
    decay_error = 2 * U * decayed.abs() if s.weight_decay != 0 else 0.0
    q = (7 * U + s.extra) * update.abs() + decay_error + 2 * ETA + ETA / denominator
    return rounded(decayed - update, q)
