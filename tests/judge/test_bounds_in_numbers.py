"""Every bound in numbers, worked out by hand from its derivation.

The fuzz tests show that no kernel is outside of a bound, and that some come near it. Here each term
stands alone, so that a bound that is wider or narrower in one of them is seen.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from enclosures import ETA, SECOND_ORDER, U, eta, is_enclosed, of, u

from zerocheck import floating_point
from zerocheck.floating_point import BF16, FP32, Format
from zerocheck.judge import bounds
from zerocheck.optimizers.adamw import bounds as adamw
from zerocheck.optimizers.adamw.bounds import Scalars

ONE = math.expm1(2 * U)
"""Two roundings to fp32 alone, which is what one rounding to bf16 has besides."""


def test_formats() -> None:
    assert (torch.float32, U, ETA) == FP32 and not FP32.narrow
    assert (torch.bfloat16, u, eta) == BF16 and BF16.narrow
    assert Format.of(torch.float16).narrow
    assert (floating_point.U, floating_point.ETA) == (U, ETA)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_last_rounding(sign: float) -> None:
    is_enclosed(floating_point.rounded(of(sign), of(0.0)), sign, U)
    is_enclosed(floating_point.rounded(of(1.75 * sign), of(2 * U)), 1.75 * sign, 3 * U)
    is_enclosed(floating_point.rounded(of(1.75 * sign), of(u), BF16), 1.75 * sign, 2 * u)
    # 2 is not reached by the exact result, but with its error.
    is_enclosed(
        floating_point.rounded(of(sign * (2 - U / 4)), of(U / 2)), sign * (2 - U / 4), 2.5 * U
    )
    is_enclosed(
        floating_point.rounded(of(sign * (2 - U / 4)), of(U / 8)), sign * (2 - U / 4), 1.125 * U
    )


def test_the_reduced_gradient() -> None:
    is_enclosed(bounds.gradient(of(0.5), of(2.0), 3), 0.5, 3 * U / (1 - 3 * U) * 2)
    is_enclosed(bounds.gradient(of(0.0), of(0.0), 3), 0.0, 3 * ETA)
    is_enclosed(bounds.gradient(of(0.5), of(2.0), 0), 0.5, 0.0)


def test_the_reduced_gradient_in_bf16() -> None:
    before = (1 + u) ** 2 * math.exp(6 * U) - 1
    is_enclosed(bounds.gradient(of(1.0), of(2.0), 3, BF16), 1.0, 2 * before + 3 * eta + u)
    is_enclosed(bounds.gradient(of(0.0), of(0.0), 3, BF16), 0.0, (3 * (1 + before) + 0.5) * eta)
    is_enclosed(bounds.gradient(of(1.0), of(2.0), 1, BF16), 1.0, 2 * ONE + u)
    is_enclosed(bounds.gradient(of(1.0), of(2.0), 0, BF16), 1.0, 0.0)


def test_the_reduced_gradient_in_several_formats() -> None:
    inputs = of(1.0), of(2.0)
    nothing = of(0.0), of(0.0)
    wide_last = ((3, BF16), (4, FP32))
    before = (1 + u) ** 3 * (1 + U) ** 4 * math.exp(6 * U) - 1
    is_enclosed(bounds.along(*inputs, wide_last), 1.0, 2 * before)
    is_enclosed(bounds.along(*nothing, wide_last), 0.0, (3 * eta + 4 * ETA) * (1 + before))
    # Numbers are multiplied by the scale and divided by it, and what underflows is less by it.
    is_enclosed(bounds.along(*inputs, wide_last, 4.0), 1.0, 2 * before)
    is_enclosed(bounds.along(*nothing, wide_last, 4.0), 0.0, (3 * eta + 4 * ETA) * (1 + before) / 4)
    # The last rounding to bf16 is of the whole result.
    narrow_last = ((4, FP32), (3, BF16))
    before = (1 + U) ** 4 * (1 + u) ** 2 * math.exp(6 * U) - 1
    lost = (3 * eta + 4 * ETA) * (1 + before)
    is_enclosed(bounds.along(*inputs, narrow_last), 1.0, 2 * before + u)
    is_enclosed(bounds.along(*nothing, narrow_last), 0.0, lost + eta / 2)
    is_enclosed(bounds.along(*inputs, narrow_last, 4.0), 1.0, 2 * before + u)
    is_enclosed(bounds.along(*nothing, narrow_last, 4.0), 0.0, (lost + eta / 2) / 4)
    is_enclosed(bounds.along(*nothing, ((3, FP32),), 4.0), 0.0, 3 * ETA / 4)
    is_enclosed(bounds.along(*inputs, ((3, FP32),), 4.0), 1.0, 3 * U / (1 - 3 * U) * 2)


def test_the_norm() -> None:
    assert bounds.norm_relative(1000) == pytest.approx(504 * U * SECOND_ORDER, rel=1e-12, abs=0.0)
    off = (1 - u) ** -5 - 1
    for share in (0.0, 0.25, 1.0):
        narrow = math.sqrt(1 + share * ((1 + off) ** 2 - 1))
        found = bounds.narrow_norm_relative(1000, share, 4, BF16)
        assert found == pytest.approx(narrow * (1 + 504 * U * SECOND_ORDER) - 1, rel=1e-9, abs=0.0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_clipped_gradient(sign: float) -> None:
    is_enclosed(bounds.clipped(of(3.0 * sign), 0.5), 1.5 * sign, 4 * U * 1.5 + U)
    is_enclosed(bounds.clipped(of(0.0), 0.5), 0.0, 1.5 * ETA)
    for only, factor in ((False, (1 - u) ** -1), (True, (1 - u) ** -3)):
        off = factor * math.exp(4 * U) - 1
        found = bounds.clipped(of(3.0 * sign), 0.5, BF16, all_narrow=only)
        is_enclosed(found, 1.5 * sign, 1.5 * off + u)
        is_enclosed(bounds.clipped(of(0.0), 0.5, BF16, all_narrow=only), 0.0, 1.5 * eta)


def test_scalars_in_double() -> None:
    given = {"lr": 0.1, "beta1": 0.5, "beta2": 0.25, "eps": 1e-3, "weight_decay": 0.3, "step": 2}
    s = adamw.scalars(**given, reading="double")
    assert s[:5] == (0.1, 0.5, 0.25, 1e-3, 0.3)
    assert (s.correction1, s.correction2) == pytest.approx((0.75, 0.9375), rel=1e-15, abs=0.0)
    assert s.extra == pytest.approx(2.0**-52 * (1 / 0.75 + 1 / (2 * 0.9375)), rel=1e-9, abs=0.0)


def test_scalars_in_single() -> None:
    given = {"lr": 0.1, "beta1": 0.5, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.3, "step": 2}
    s = adamw.scalars(**given, reading="single")
    assert s[:5] == tuple(
        torch.tensor((0.1, 0.5, 0.9, 1e-3, 0.3), dtype=torch.float32).double().tolist()
    )
    second = float(1 - Fraction(s.beta2) ** 2)
    assert (s.correction1, s.correction2) == pytest.approx((0.75, second), rel=1e-14, abs=0.0)
    added = 2 * U * (0.25 / 0.75 + (1 - second) / second)
    added += 2.0**-52 * (1 / 0.75 + 1 / (2 * second))
    assert s.extra == pytest.approx(added, rel=1e-9, abs=0.0)


def test_bias_corrections() -> None:
    assert adamw.correction(0.0, 1) == adamw.correction(0.0, 7) == 1.0
    for beta in (0.5, 0.9, 0.999999):
        exact = float(1 - Fraction(beta) ** 3)
        assert adamw.correction(beta, 3) == pytest.approx(exact, rel=1e-14, abs=0.0)


HALF = Scalars(0.5, 0.5, 0.75, 0.25, 0.5, 0.25, 0.25, U)
"""lr, beta1, beta2, eps, weight_decay, both corrections, extra."""


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_update_of_moments_that_were_stored_in_bf16(sign: float) -> None:
    largest = adamw._stored(of(sign), of(1.0), HALF, BF16)
    m, v = 1 + u, 1 - u
    wanted = 0.5 / 0.25 * m / (math.sqrt(v / 0.25) + 0.25)
    assert float(largest) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_exp_avg(sign: float) -> None:
    # lerp: 3 (1 - b1) |g - m|, here of numbers that are of two signs.
    is_enclosed(adamw.exp_avg(of(4.0 * sign), of(-2.0 * sign), HALF), sign, 9 * U + U)
    # Multiply-add: 2 b1 |m| + 2 (1 - b1) |g|, of equal ones.
    is_enclosed(adamw.exp_avg(of(4.0 * sign), of(4.0 * sign), HALF), 4 * sign, 8 * U + 4 * U)
    is_enclosed(adamw.exp_avg(of(0.0), of(0.0), HALF), 0.0, 2.5 * ETA)
    unknown = 9 * U + 0.5 * 2.0**-20
    is_enclosed(adamw.exp_avg(of(4.0 * sign), of(-2.0 * sign), HALF, 2.0**-20), sign, unknown + U)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_exp_avg_in_bf16(sign: float) -> None:
    given = of(4.0 * sign), of(-2.0 * sign), HALF
    is_enclosed(adamw.exp_avg(*given, format=BF16), sign, 9 * U + 3 * u + u)
    unknown = 0.5 * 0.125 + u * 0.5 * 0.125
    is_enclosed(adamw.exp_avg(*given, 0.125, BF16), sign, 9 * U + 3 * u + unknown + u)
    is_enclosed(adamw.exp_avg(of(0.0), of(0.0), HALF, format=BF16), 0.0, 2.5 * eta)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_exp_avg_sq(sign: float) -> None:
    is_enclosed(adamw.exp_avg_sq(of(4.0), of(2.0 * sign), HALF), 4.0, 6 * U + 3 * U + 4 * U)
    is_enclosed(adamw.exp_avg_sq(of(4.0), of(0.0), HALF), 3.0, 6 * U + 2 * U)
    # What is held may be wrong; the bound is one all the same.
    is_enclosed(adamw.exp_avg_sq(of(-4.0), of(2.0 * sign), HALF), -2.0, 9 * U + 2 * U)
    is_enclosed(adamw.exp_avg_sq(of(0.0), of(0.0), HALF), 0.0, 2.5 * ETA)
    unknown = 0.25 * 0.5 * (4 + 0.5)
    found = adamw.exp_avg_sq(of(4.0), of(2.0 * sign), HALF, 0.5)
    is_enclosed(found, 4.0, 9 * U + unknown + 4 * U)


def test_exp_avg_sq_in_bf16() -> None:
    is_enclosed(adamw.exp_avg_sq(of(4.0), of(2.0), HALF, format=BF16), 4.0, 9 * U + 6 * u + 4 * u)
    is_enclosed(adamw.exp_avg_sq(of(-4.0), of(2.0), HALF, format=BF16), -2.0, 9 * U + 6 * u + 2 * u)
    is_enclosed(adamw.exp_avg_sq(of(0.0), of(0.0), HALF, format=BF16), 0.0, 2.5 * eta)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_parameter(sign: float) -> None:
    # Denominator sqrt(0.5625 / 0.25) + 0.25 = 1.75; update 2 * 1.75 / 1.75 = 2; 1.5 - 2 = -0.5.
    given = of(2.0 * sign), of(1.75 * sign), of(0.5625)
    is_enclosed(adamw.parameter(*given, HALF), -0.5 * sign, 2 * 8 * U + 1.5 * 2 * U + U / 2)
    # Nothing decays, and 2 - 2 = 0 leaves h of the error alone, which is a power of two.
    still = HALF._replace(weight_decay=0.0)
    is_enclosed(adamw.parameter(*given, still), 0.0, 16 * U + 2.0**-44)
    # Of nothing, 2 eta, and eta over the denominator, 0.25.
    is_enclosed(adamw.parameter(of(0.0), of(0.0), of(0.0), HALF), 0.0, 6 * ETA + 0.5 * ETA)
    # An update that goes the same way as the decay.
    given = of(2.0 * sign), of(-1.75 * sign), of(0.5625)
    is_enclosed(adamw.parameter(*given, HALF), 3.5 * sign, 2 * 8 * U + 1.5 * 2 * U + 2 * U)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_parameter_in_bf16_by_operations(sign: float) -> None:
    given = of(2.0 * sign), of(1.75 * sign), of(0.5625)
    four = 2 * ((1 - u) ** -4 - 1)
    found = adamw.parameter(*given, HALF, BF16)
    is_enclosed(found, -0.5 * sign, 16 * U + four + 3 * u + u / 2)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_parameter_in_bf16_fused(sign: float) -> None:
    """m and v are as small as can be: half a unit of them is half of them."""
    s = Scalars(2.0, 0.5, 0.75, 0.0, 0.0, 1.0, 0.5, 0.0)
    m, v = 2.0**-133, 2.0**-133
    update = 2 * m / math.sqrt(2 * v)
    largest = 2 * 1.5 * m / math.sqrt(2 * 0.5 * v)
    found = adamw.parameter(of(0.0), of(m * sign), of(v), s, BF16)
    error = 7 * U * update + (largest - update) + 2 * eta + ETA / math.sqrt(2 * v)
    exponent = math.floor(math.log2(update + error))
    assert float(found.exact) == pytest.approx(-update * sign, rel=1e-15, abs=0.0)
    assert float(found.bound) == pytest.approx(
        (error + 2.0 ** (exponent - 8)) * SECOND_ORDER, rel=1e-9
    )
    # Of v = 0 nothing is left to take off, and eps is all of the denominator.
    s = s._replace(eps=2.0**-133)
    found = adamw.parameter(of(0.0), of(0.0), of(0.0), s, BF16)
    is_enclosed(found, 0.0, 2 * (eta / 2) / eta + 2 * eta + ETA / eta + u)


def test_where_neither_a_gradient_nor_eps_ever_was_there_is_no_number() -> None:
    still = HALF._replace(eps=0.0)
    for format in (FP32, BF16):
        found = adamw.parameter(of(1.0), of(0.0), of(0.0), still, format)
        assert math.isnan(float(found.exact))


def test_a_second_moment_that_overflowed_leaves_the_parameter_where_it_is() -> None:
    still = HALF._replace(weight_decay=0.0)
    for format, half in ((FP32, 2 * U), (BF16, 2 * u)):
        is_enclosed(adamw.parameter(of(2.0), of(1.0), of(math.inf), still, format), 2.0, half)
