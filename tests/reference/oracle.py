"""AdamW once more, in numpy's longdouble, from the equations and without a look at the reference.

p' = (1 - a w) p - a mhat / (sqrt(vhat) + eps), mhat = m' / (1 - b1^t), vhat = v' / (1 - b2^t),
m' = b1 m + (1 - b1) g, v' = b2 v + (1 - b2) g g; AMSGrad puts max(vmax, v') in place of v'.

The bias corrections come from decimal arithmetic with 60 digits. On x86 a longdouble has 64 bits of
significand, so a few operations leave some 2**-62 relative: 2**-9 of a unit of float64.
"""

from __future__ import annotations

from decimal import Context, Decimal
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Wide = NDArray[np.longdouble]
_DIGITS = Context(prec=60)


class Scalars(NamedTuple):
    """The exact values of the float64 scalars that a step was given, and its number from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    maximize: bool = False


class Exact(NamedTuple):
    """New moments, and the parts of the new parameter: p' = decayed - update."""

    m: Wide
    v: Wide
    decayed: Wide
    update: Wide
    denominator: Wide


def wide(array: Any) -> Wide:
    """Anything array-like as longdouble, exactly."""
    return np.asarray(array).astype(np.longdouble)


def correction(beta: float, step: int) -> np.longdouble:
    """1 - beta**step."""
    power = _DIGITS.power(Decimal(beta), Decimal(step)) if beta else Decimal(0)
    return np.longdouble(str(_DIGITS.subtract(Decimal(1), power)))


def moments(m: Wide, v: Wide, g: Wide, scalars: Scalars) -> tuple[Wide, Wide]:
    """m' and v'."""
    b1, b2 = wide(scalars.beta1), wide(scalars.beta2)
    g = -g if scalars.maximize else g
    return b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g


def parameter(p: Wide, m: Wide, v: Wide, scalars: Scalars) -> tuple[Wide, Wide, Wide]:
    """decayed, update and denominator from the new moments; v is vmax with AMSGrad."""
    a = wide(scalars.lr)
    first, second = (correction(b, scalars.step) for b in (scalars.beta1, scalars.beta2))
    decayed = (1 - a * wide(scalars.weight_decay)) * p
    with np.errstate(invalid="ignore", divide="ignore"):
        denominator = np.sqrt(v / second) + wide(scalars.eps)
        update = a * (m / first) / denominator
    return decayed, update, denominator
