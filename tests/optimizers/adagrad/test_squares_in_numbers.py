"""The bounds of Adagrad and RMSprop in numbers, worked out by hand: each term stands alone."""

from __future__ import annotations

import math

import pytest
from enclosures import ETA, U, eta, is_enclosed, of, u

from zerocheck.floating_point import BF16, FP32
from zerocheck.optimizers.adagrad.bounds import (
    SquareScalars,
    direction,
    momentum_buffer,
    quotient,
    squares,
)
from zerocheck.optimizers.coupled_decay import Direction

ADAGRAD = SquareScalars(0.5, 1.0, 1.0, 0.5, 0.0, 0.0)
RMSPROP = SquareScalars(0.5, 0.5, 0.25, 0.5, 0.0, 0.5)
SIGNS = pytest.mark.parametrize("sign", [1.0, -1.0])


def test_the_direction_of_a_known_gradient_has_no_error() -> None:
    made = direction(of(1.0), of(0.5), ADAGRAD)
    assert (float(made.exact), float(made.error)) == (0.5, 0.0)


@SIGNS
def test_sums_of_squares(sign: float) -> None:
    d, e = of(0.5 * sign), 2 * U
    known = Direction(d, of(e))
    is_enclosed(squares(of(1.0), known, ADAGRAD), 1.25, 0.25 * U + e * (1 + e) + U)
    bound = 3 * U * 0.0625 + 0.25 * e * (1 + e) + 2 * U * 0.5 + U / 2
    is_enclosed(squares(of(1.0), known, RMSPROP), 0.5625, bound)
    bound = 3 * U * 0.0625 + 0.25 * e * (1 + e) + 2 * (U + u) * 0.5 + u / 2
    is_enclosed(squares(of(1.0), known, RMSPROP, BF16), 0.5625, bound)
    # One factor that is not 1, and the other that is.
    faded = ADAGRAD._replace(kept=0.5)
    is_enclosed(squares(of(2.0), known, faded), 1.25, 0.25 * U + e * (1 + e) + 2 * U + U)
    nothing = Direction(of(0.0), of(0.0))
    is_enclosed(squares(of(0.0), nothing, ADAGRAD), 0.0, 2.5 * ETA)
    is_enclosed(squares(of(0.0), nothing, ADAGRAD, BF16), 0.0, 2.5 * eta)


@SIGNS
@pytest.mark.parametrize("factor", [2.0, -2.0])
def test_the_quotient(sign: float, factor: float) -> None:
    e, v = 2 * U, of(2.25)  # root and eps: 2
    made = quotient(Direction(of(sign), of(e)), v, ADAGRAD, FP32, factor)
    assert float(made.exact) == sign * factor / 2
    assert float(made.error) == pytest.approx(5 * U + e, rel=1e-9)
    lost = quotient(Direction(of(0.0), of(0.0)), v, ADAGRAD, FP32, factor)
    assert float(lost.error) == 1.5 * ETA
    narrow = quotient(Direction(of(sign), of(e)), v, ADAGRAD, BF16, factor)
    four = (1 - u) ** -4 - 1
    assert float(narrow.error) == pytest.approx(5 * U + e + four * (1 + e), rel=1e-9)


@SIGNS
@pytest.mark.parametrize("factor", [2.0, -2.0])
def test_squares_that_were_larger_before_they_were_stored_in_bf16(
    sign: float, factor: float
) -> None:
    """The unit of a subnormal is a large part of it: 2 eta may have been 1.5 eta."""
    v, d = 2 * eta, of(2.0**-66 * sign)  # as large as the root of v
    bare = ADAGRAD._replace(eps=0.0)
    made = quotient(Direction(d, of(2.0**-67)), of(v), bare, BF16, factor)
    assert float(made.exact) == sign * factor
    assert float(made.error) == pytest.approx(2 * 1.5 / math.sqrt(0.75) - 2, rel=1e-9)


@SIGNS
def test_the_buffer(sign: float) -> None:
    d, v = Direction(of(sign), of(2 * U)), of(2.25)
    # 2 u of mu b, and 5 u of the quotient with half of the error of d.
    found = momentum_buffer(of(sign), d, v, RMSPROP)
    is_enclosed(found, sign, U + 2.5 * U + U + U)
