"""Number formats against numpy.spacing, exact rationals and torch's own conversions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerocheck_reference import half_ulp, round_to, smallest_subnormal, unit_roundoff

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """All 2**16 bit patterns of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def some_patterns() -> torch.Tensor:
    """Random bit patterns of float32, so every binade, and the edges."""
    random = torch.randint(-(2**31), 2**31, (20000,), generator=torch.manual_seed(1))
    edges = [0.0, -0.0, 2**-149, 2**-126, 1.0, 1 - 2**-24, 2**127, torch.inf, torch.nan]
    return torch.cat([random.to(torch.int32).view(torch.float32), torch.tensor(edges)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_constants_are_those_of_torch(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    assert unit_roundoff(dtype) == info.eps / 2
    assert smallest_subnormal(dtype) == info.tiny * info.eps


def test_half_ulp_of_float32_is_half_of_numpy_spacing() -> None:
    x = some_patterns()
    with np.errstate(invalid="ignore"):
        expected = np.spacing(np.abs(x.numpy())).astype(np.float64) / 2
    # numpy.spacing says inf where the next number up is: at the largest one.
    expected[x.abs().numpy() == np.finfo(np.float32).max] = 2.0**103
    np.testing.assert_array_equal(half_ulp(x).numpy(), expected)


def test_half_ulp_of_float16_is_half_of_numpy_spacing() -> None:
    x = every_pattern(torch.float16)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = np.spacing(np.abs(x.numpy())).astype(np.float64) / 2
    expected[x.abs().numpy() == np.finfo(np.float16).max] = 16.0
    np.testing.assert_array_equal(half_ulp(x, torch.float16).numpy(), expected)


def test_half_ulp_of_bfloat16_is_half_the_gap_to_the_next_pattern() -> None:
    # The patterns of the positive numbers, 0 to the largest, are in the order of their values.
    x = every_pattern(torch.bfloat16)[2**15 : 2**15 + 0x7F80].to(torch.float64)
    torch.testing.assert_close(half_ulp(x, torch.bfloat16)[:-1], x.diff() / 2, rtol=0, atol=0)


def test_half_ulp_between_the_numbers_and_beyond_them() -> None:
    x = torch.tensor([1.999999999, 2.0, 1e-300, 2.0**130, -3.0, 5e-324], dtype=torch.float64)
    expected = [2.0**-24, 2.0**-23, 2.0**-150, 2.0**106, 2.0**-23, 2.0**-150]
    assert half_ulp(x).tolist() == expected
    assert half_ulp(x.reshape(2, 3)).shape == (2, 3)
    assert half_ulp(torch.tensor(1.0)).shape == ()
    assert half_ulp(torch.empty(0)).shape == (0,)
    assert half_ulp(torch.tensor([torch.inf, torch.nan])).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_ulp_at_both_ends_of_every_binade_of_float64(dtype: torch.dtype) -> None:
    """By Python's own exponents: subnormals, infinity and NaN included, of both signs."""
    exponents = torch.arange(0x800) << 52  # infinity and NaN are the last
    mantissas = torch.tensor([0, 1, 2**51, 2**52 - 1])
    signs = torch.tensor([0, -(2**63)])
    x = (exponents[:, None, None] + mantissas[:, None] + signs).view(torch.float64)
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    lowest = round(math.log2(smallest_subnormal(dtype)))

    def half(value: float) -> float:
        if not math.isfinite(value):
            return math.nan
        exponent = math.frexp(value)[1] - digits if value else lowest
        return 2.0 ** (max(exponent, lowest) - 1)

    expected = [half(value) for value in x.flatten().tolist()]
    given = x.clone()
    np.testing.assert_array_equal(half_ulp(x, dtype).flatten().numpy(), expected)
    assert torch.equal(x.view(torch.int64), given.view(torch.int64))


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(DTYPES))
def test_round_to_is_one_rounding(value: float, dtype: torch.dtype) -> None:
    """The result is the nearest multiple of the spacing, ties to even, in exact rationals."""
    x = torch.tensor(value, dtype=torch.float64)
    rounded = round_to(x, dtype)
    assert rounded.dtype == dtype
    spacing = 2 * Fraction(half_ulp(x, dtype).item())
    nearest = round(Fraction(value) / spacing) * spacing
    if abs(nearest) > Fraction(torch.finfo(dtype).max):
        assert rounded.item() == float("inf") * (1 if value > 0 else -1)
    else:
        assert Fraction(rounded.item()) == nearest
        assert torch.signbit(rounded) == torch.signbit(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_round_to_does_not_round_twice(dtype: torch.dtype) -> None:
    """Just above a tie: float32 makes it a tie, and to even is then down."""
    x = torch.tensor(1 + unit_roundoff(dtype) + 2.0**-50, dtype=torch.float64)
    assert round_to(x, dtype).item() == 1 + 2 * unit_roundoff(dtype)
    assert x.to(dtype).item() == 1.0


def test_round_to_keeps_what_is_not_finite_and_wider_formats() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.1], dtype=torch.float64)
    for dtype in [*DTYPES, torch.float64]:
        out = round_to(x, dtype)
        assert out[:2].tolist() == [torch.inf, -torch.inf] and out[2].isnan()
    assert round_to(x, torch.float64)[3].item() == 0.1


def test_refusals() -> None:
    for call in (unit_roundoff, smallest_subnormal):
        with pytest.raises(ValueError, match=r"float64 \(allowed: torch.float32"):
            call(torch.float64)
    with pytest.raises(ValueError, match="int64"):
        half_ulp(torch.tensor([1]))
    with pytest.raises(ValueError, match="int32"):
        round_to(torch.ones(1), torch.int32)
