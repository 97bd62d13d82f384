"""Schedules of the learning rate: a factor on the base rate for the step with index 0, 1, 2, ...

No factor is 0 inside the `total` steps. A learning rate of 0, as schedules have it that begin with
0 / warmup, hides the whole step from whoever checks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ._check import whole

Schedule = Callable[[int], float]


def constant() -> Schedule:
    """The factor 1 at every step."""

    def factor(step: int) -> float:
        whole("step", step)
        return 1.0

    return factor


def linear_warmup(warmup: int, total: int) -> Schedule:
    """Linear from 0 to 1, then linear back to 0.

    (step + 1) / (warmup + 1) before the step `warmup`, where it is 1; from there
    (total - step) / (total - warmup); 0 from step `total` on. In steps. ValueError unless
    0 <= warmup < total, or for a step that is no int >= 0.
    """
    return _warmup_then(warmup, total, lambda left: left)


def cosine(warmup: int, total: int) -> Schedule:
    """Linear from 0 to 1, then half a cosine wave back to 0.

    As `linear_warmup`, but after the step `warmup` the factor is
    (1 + cos(pi (step - warmup) / (total - warmup))) / 2: Loshchilov & Hutter, "SGDR" (arXiv
    1608.03983), equation 5, with one period and the minimum 0.
    """
    return _warmup_then(warmup, total, lambda left: 0.5 * (1.0 - math.cos(math.pi * left)))


def _warmup_then(warmup: int, total: int, decay: Callable[[float], float]) -> Schedule:
    """`decay` maps the share of the decay that is left, 1 to 0, to the factor."""
    whole("warmup", warmup)
    whole("total", total, low=1)
    if warmup >= total:
        raise ValueError(f"warmup is {warmup} (allowed: less than total, which is {total})")

    def factor(step: int) -> float:
        whole("step", step)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if step >= total:
            return 0.0
        return decay((total - step) / (total - warmup))

    return factor
