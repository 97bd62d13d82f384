"""The table of bounds for one AdamW step, as an independent check of whoever took it.

u is the unit round-off, eta the smallest subnormal, h(x) half the spacing at |x|. Each bound is
E = q + h(|exact| + q), times 1 + 1e-6 for products of round-offs. q counts the roundings that a
term meets before the last one, which is h:

exp_avg     m + (1 - b1) (g - m) by lerp: the scalar, the difference and the product, 3 u of
            (1 - b1) |g - m|. As b1 m + (1 - b1) g: the scalar and the product, 2 u of each term.
            Two products may underflow: eta / 2 each, and scalars times subnormals: 2 eta covers it.
exp_avg_sq  b2 v: scalar and product, 2 u. (1 - b2) g g: scalar and two products, 3 u. 2 eta.
parameter   given the new moments. p (1 - lr wd): scalar and product, 2 u. The update: root,
            scalar and quotient of the second correction, sum with eps: 4; lr / c1 as a scalar,
            product with m, quotient: 3; 7 u. The scalar eps meets 2, which is less than 4. lr m
            may underflow before it is divided: eta / den; product and quotient: 2 eta.

Bias corrections are scalars in float64. torch has 1 - b**t: one unit in the last place for the
power, one rounding for the difference, so 2**-52 / c1, and half of 2**-52 / c2 behind the root.

In float64 the scalars themselves are not exact on entry. Then 1 - lr wd meets two more roundings
(lr wd, and the difference), and the corrections, from log, product, expm1 at 1 ulp = 2 u each, are
within 5 u: 5 + 2.5, and 1 for the root of the second. With these 8.5 u the update has 15.5 u.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .oracle import Scalars, Wide, correction, moments, parameter, wide


class Format(NamedTuple):
    """Significand bits, exponent of the smallest subnormal."""

    digits: int
    lowest: int


FLOAT32 = Format(24, -149)
FLOAT64 = Format(53, -1074)
SECOND_ORDER = 1.0 + 1e-6


class State(NamedTuple):
    """As numpy arrays, in the dtype that the step was computed in."""

    p: NDArray[Any]
    m: NDArray[Any]
    v: NDArray[Any]
    vmax: NDArray[Any] | None = None


def half_ulp(x: Wide, form: Format) -> Wide:
    """Half the spacing of the format at |x|, by frexp and ldexp."""
    exponent = np.frexp(np.abs(x))[1]
    exponent = np.where(x == 0, form.lowest, exponent - form.digits)
    return np.ldexp(np.longdouble(0.5), np.maximum(exponent, form.lowest))


def ratios(
    before: State, g: NDArray[Any], scalars: Scalars, after: State, form: Format
) -> dict[str, float]:
    """The largest error / bound of each role; a correct step has none above 1.

    A NaN gives NaN, which is above nothing and below nothing: test `not ratio <= 1`. The moments
    are judged from the old state, the parameter from the new moments `after` holds.
    """
    u, eta = np.longdouble(2.0) ** -form.digits, np.longdouble(2.0) ** form.lowest
    p, m, v, grad = (wide(x) for x in (before.p, before.m, before.v, g))
    b1, b2 = wide(scalars.beta1), wide(scalars.beta2)
    m1, v1 = moments(m, v, grad, scalars)
    signed = -grad if scalars.maximize else grad
    lerp = 3 * (1 - b1) * np.abs(signed - m)
    sums = 2 * b1 * np.abs(m) + 2 * (1 - b1) * np.abs(signed)
    q_m = u * np.maximum(lerp, sums) + 2 * eta
    q_v = u * (2 * b2 * v + 3 * (1 - b2) * grad * grad) + 2 * eta

    second = after.v if after.vmax is None else after.vmax
    decayed, update, denominator = parameter(p, wide(after.m), wide(second), scalars)
    decay = 2 * np.abs(decayed) if scalars.weight_decay else 0 * p
    step = np.abs(update)
    if form is FLOAT64:
        decay = decay + np.abs(p) * (1 + scalars.lr * scalars.weight_decay)
        corrections = 8.5 * u
    else:
        c1, c2 = (correction(b, scalars.step) for b in (scalars.beta1, scalars.beta2))
        corrections = np.longdouble(2.0) ** -52 * (1 / c1 + 0.5 / c2)
    q_p = u * (decay + 7 * step) + corrections * step + 2 * eta + eta / denominator

    result = {
        "exp_avg": _worst(after.m, m1, q_m, form),
        "exp_avg_sq": _worst(after.v, v1, q_v, form),
        "parameter": _worst(after.p, decayed - update, q_p, form),
    }
    if before.vmax is not None:
        # A maximum rounds nothing.
        assert after.vmax is not None
        same = np.array_equal(after.vmax, np.maximum(before.vmax, after.v))
        result["max_exp_avg_sq"] = 0.0 if same else float("inf")
    return result


def _worst(observed: NDArray[Any], exact: Wide, q: Wide, form: Format) -> float:
    bound = (q + half_ulp(np.abs(exact) + q, form)) * SECOND_ORDER
    return float(np.max(np.abs(wide(observed) - exact) / bound, initial=0.0))
