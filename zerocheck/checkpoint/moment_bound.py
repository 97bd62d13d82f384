r"""Bound on exp_avg given exp_avg_sq, which every run of AdamW obeys.

From zero moments, t updates with gradients g_1 ... g_t and constant betas give, without rounding,

    m = (1 - b1) \sum_k b1^k g_{t-k},    v = (1 - b2) \sum_k b2^k g_{t-k}^2,    k = 0 ... t-1.

By Cauchy-Schwarz, with b1^k = (b1 / sqrt b2)^k sqrt(b2)^k and q = b1^2 / b2,

    m^2 <= (1 - b1)^2 / (1 - b2) * S_t(q) * v,    S_t(q) = 1 + q + ... + q^{t-1}.

It is attained: with t = 1 by every gradient. S_t is finite for each t, and 1 / (1 - q) is its limit
where q < 1. A step count that was set back makes S_t too small, and is seen if m is large.

With rounding. u is the unit round-off of the state's dtype; s = 2^-23 is what the scalars can be
off, which are below one and rounded twice at most where a kernel has them in fp32. Every form of
the update in torch (lerp, multiply and add, fused) takes at most four roundings on the path of a
term, so the computed moments obey

    |M_t| <= B1 |M_{t-1}| + W1 |g_t| + a,
             B1 = (1 + u) (b1 + 3 u + s),  W1 = (1 + u) (1 - b1 + 3 u + s)
     V_t  >= B2 V_{t-1} + W2 g_t^2 - a,
             B2 = (1 - u)^2 (b2 - s),      W2 = (1 - u)^4 (1 - b2 - s)

In lerp, m + w (g - m), the difference and the product are rounded, each by at most u w (|g| + |m|)
<= u (|g| + |m|), hence 3 u added to b1 and to 1 - b1, second order included; the sum by (1 + u).
Underflow costs at most a = 4 tiny per step, tiny being the smallest normal number of the dtype,
since kernels may flush what is smaller to zero. The same argument, with these constants, gives

    |M| <= A1 + W1 sqrt(S_t(B1^2 / B2) (V + A2) / W2),    A_i = a S_t(B_i).

It is evaluated in float64, whose own rounding (1 + 1e-12) covers. Nothing is reported where
W2 <= 0 or S_t overflows. Gradients are arbitrary, so weight decay, clipping, loss scaling and
amsgrad change nothing; betas that change during training do, and the finding says that it assumes
they did not.
"""

from __future__ import annotations

import math

import torch

_SCALARS = 2.0**-23
_EVALUATION = 1 + 1e-12


def largest(v: torch.Tensor, betas: tuple[float, float], step: float) -> torch.Tensor | None:
    """Return the largest |exp_avg| for each element of exp_avg_sq, float64, or None if unbounded.

    v: exp_avg_sq, floating point, any shape; step: the number of updates, a whole number from 1 on.
    """
    info = torch.finfo(v.dtype)
    u, tiny = info.eps / 2, info.tiny
    b1, b2 = betas
    keep1 = (1 + u) * (b1 + 3 * u + _SCALARS)
    add1 = (1 + u) * (1 - b1 + 3 * u + _SCALARS)
    keep2 = (1 - u) ** 2 * (b2 - _SCALARS)
    add2 = (1 - u) ** 4 * (1 - b2 - _SCALARS)
    if add2 <= 0:
        return None
    # A beta2 of 0 keeps nothing of old gradients, and a beta1 of 0 needs nothing of them.
    ratio = keep1**2 / keep2 if keep2 > 0 else math.inf
    total, lost1, lost2 = (_sum(one, step) for one in (ratio, keep1, max(keep2, 0.0)))
    if not math.isfinite(total * lost1 * lost2):
        return None
    below = v.double().clamp(min=0) + 4 * tiny * lost2
    # In place: memory holds one tensor of float64.
    return below.mul_(total / add2).sqrt_().mul_(add1).add_(4 * tiny * lost1).mul_(_EVALUATION)


def _sum(ratio: float, terms: float) -> float:
    """1 + ratio + ... with so many terms, from above."""
    if terms <= 1:
        return 1.0
    if not math.isfinite(ratio):
        return math.inf
    ratio *= 1 + 1e-15  # it was rounded itself
    if abs(ratio - 1) * terms < 1e-6:
        return terms * (1 + 2e-6)  # each term is below exp(1e-6)
    try:
        return math.expm1(terms * math.log(ratio)) / (ratio - 1) if ratio > 0 else 1.0
    except OverflowError:
        return math.inf
