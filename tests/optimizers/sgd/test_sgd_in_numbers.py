"""The bounds of SGD in numbers, worked out by hand: each term stands alone."""

from __future__ import annotations

import pytest
import torch
from enclosures import ETA, U, eta, is_enclosed, of, u

from zerocheck.floating_point import BF16, FP32
from zerocheck.optimizers.coupled_decay import decayed, product, stored
from zerocheck.optimizers.sgd.bounds import SGDScalars, direction, grown, momentum_buffer, parameter

DECAYED = SGDScalars(0.5, 0.5, 0.25, nesterov=False)
PLAIN = SGDScalars(0.5, 0.0, 0.0, nesterov=False)
SIGNS = pytest.mark.parametrize("sign", [1.0, -1.0])
GROWN = (1 + u) ** 5


@SIGNS
def test_a_scalar_times_a_tensor(sign: float) -> None:
    assert float(product(of(2.0 * sign), FP32)) == 4 * U + ETA
    assert float(product(of(2.0 * sign), BF16)) == 4 * (U + u) + eta
    assert [float(product(of(0.0), one)) for one in (FP32, BF16)] == [ETA, eta]


@SIGNS
def test_a_gradient_with_weight_decay(sign: float) -> None:
    made = decayed(of(sign), of(0.5 * sign), 0.25, 3 * U)
    assert (float(made.exact), float(made.error)) == (0.75 * sign, 3.5 * U)
    assert float(stored(made, 0.25, FP32).error) == 3.5 * U + U * (0.75 + 3.5 * U)
    assert stored(made, 0.0, FP32) is made, "no sum, no rounding"
    without = decayed(of(sign), of(0.5 * sign), 0.0, 3 * U)
    assert (float(without.exact), float(without.error)) == (0.5 * sign, 3 * U)
    assert float(decayed(of(1.0), of(0.5), 0.0).error) == 0.0


@SIGNS
def test_the_buffer(sign: float) -> None:
    p, g = of(sign), of(0.5 * sign)
    # 0.25 p and 0.5 b have 2 u each, d has one, and the sum one of a result below 2.
    is_enclosed(momentum_buffer(p, of(2.0 * sign), g, DECAYED), 1.75 * sign, 4.25 * U + U * U / 2)
    is_enclosed(momentum_buffer(p, of(sign), g, DECAYED), 1.25 * sign, 3.25 * U + U * U / 2)
    # Nothing in it yet: the last rounding is that of d.
    is_enclosed(momentum_buffer(p, of(0.0), g, DECAYED), 0.75 * sign, U)
    undecayed = DECAYED._replace(weight_decay=0.0)
    is_enclosed(momentum_buffer(p, of(2.0 * sign), g, undecayed), 1.5 * sign, 3 * U)
    is_enclosed(momentum_buffer(p, of(2.0 * sign), g, undecayed, 3 * U), 1.5 * sign, 6 * U)


@SIGNS
def test_the_buffer_in_bf16(sign: float) -> None:
    given = of(sign), of(2.0 * sign), of(0.5 * sign)
    decay = 0.5 * (U + u)
    error = decay + 2 * (U + u) + u * (0.75 + decay)
    is_enclosed(momentum_buffer(*given, DECAYED, format=BF16), 1.75 * sign, error * GROWN + u)
    assert float(grown(of(3.0), BF16)) == 3 * GROWN
    assert float(grown(of(3.0), FP32)) == 3.0


@SIGNS
def test_the_parameter_without_momentum(sign: float) -> None:
    p, b, g = of(sign), of(7.0), of(0.5 * sign)
    # 2 u of lr g, and the last rounding, of a result below 1.
    is_enclosed(parameter(p, b, g, PLAIN), 0.75 * sign, 0.5 * U + U / 2)
    is_enclosed(parameter(p, b, g, PLAIN, 3 * U), 0.75 * sign, 2 * U + U / 2)
    backwards = PLAIN._replace(lr=-0.5)
    is_enclosed(parameter(p, b, g, backwards, 3 * U), 1.25 * sign, 2 * U + U)
    decay = PLAIN._replace(weight_decay=0.25)
    error = 0.5 * U + U * (0.75 + 0.5 * U)
    is_enclosed(parameter(p, b, g, decay), 0.625 * sign, 0.75 * U + error / 2 + U / 2)


@SIGNS
def test_the_parameter_in_bf16(sign: float) -> None:
    p, b, g = of(sign), of(0.75 * sign), of(0.5 * sign)
    update = 2 * (U + u) * 0.25
    found = parameter(p, b, g, PLAIN, format=BF16)
    is_enclosed(found, 0.75 * sign, update * GROWN + u / 2)
    # The fused kernel has the buffer from before it was stored: half a unit below 1.
    update = 2 * (U + u) * 0.375 + 0.5 * u / 2
    found = parameter(p, b, g, DECAYED, format=BF16)
    is_enclosed(found, 0.625 * sign, update * GROWN + u / 2)


@SIGNS
def test_the_direction(sign: float) -> None:
    p, b, g = of(sign), of(0.75 * sign), of(0.5 * sign)
    plain = direction(p, b, g, PLAIN)
    assert (float(plain.exact), float(plain.error)) == (0.5 * sign, 0.0)
    heavy = direction(p, b, g, DECAYED, 9.0)
    assert (float(heavy.exact), float(heavy.error)) == (0.75 * sign, 0.0), "the buffer as it is"
    ahead = DECAYED._replace(nesterov=True)
    made = direction(p, b, g, ahead)
    error = 0.5 * U + U * (0.75 + 0.5 * U) + 0.75 * U
    assert float(made.exact) == 1.125 * sign
    assert float(made.error) == pytest.approx(error + U * (1.125 + error), rel=1e-9)
    narrow = direction(p, b, g, ahead, format=BF16)
    decay = 0.5 * (U + u)
    error = decay + u * (0.75 + decay) + 0.75 * (U + u) + 0.5 * u / 2
    assert float(narrow.error) == pytest.approx(error + u * (1.125 + error), rel=1e-9)


def test_what_underflows() -> None:
    nothing = of(0.0), of(0.0), of(0.0)
    is_enclosed(parameter(*nothing, PLAIN), 0.0, 1.5 * ETA)
    lost = eta * GROWN + eta / 2
    assert torch.equal(parameter(*nothing, PLAIN, format=BF16).exact, of(0.0))
    is_enclosed(parameter(*nothing, PLAIN, format=BF16), 0.0, lost)
