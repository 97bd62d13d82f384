"""Relative errors of the bias corrections, by the derivation in `scalars`."""

from __future__ import annotations

from typing import get_args

import pytest

from zerocheck.optimizers.adamw import bounds
from zerocheck.optimizers.adamw.bounds import Scalars, U
from zerocheck.optimizers.specification import Reading

STEP = 2
ODDS = 0.25 / 0.75 + 0.5625 / 0.4375
"""b^t / (1 - b^t) of the betas 0.5 and 0.75, both at step 2."""
EXTRA = {
    "single": 2 * U * ODDS,  # beta rounded, and powf
    "single corrections": (STEP + 2) * U * ODDS + 5 * U,  # a product for each power; five roundings
}


def scalars(reading: Reading, **other: float) -> Scalars:
    numbers = {"lr": 0.1, "beta1": 0.5, "beta2": 0.75, "eps": 0.3, "weight_decay": 0.7, **other}
    return bounds.scalars(**numbers, step=STEP, reading=reading)  # type: ignore[arg-type]


@pytest.mark.parametrize("reading", get_args(Reading))
def test_relative_errors_of_the_corrections(reading: Reading) -> None:
    s = scalars(reading)
    assert (s.correction1, s.correction2) == pytest.approx((0.75, 0.4375), rel=1e-15)
    double = 2.0**-52 * (1 / 0.75 + 1 / (2 * 0.4375))
    assert s.extra == pytest.approx(double + EXTRA.get(reading, 0.0), rel=1e-12)


@pytest.mark.parametrize("reading", get_args(Reading))
def test_numbers_that_are_rounded(reading: Reading) -> None:
    """All of them in single precision, and a rate that is a tensor alone."""
    s = scalars(reading)
    assert (s.lr != 0.1) == (reading in ("single", "single rate"))
    assert (s.eps != 0.3, s.weight_decay != 0.7) == (reading == "single",) * 2
