"""The number formats that training uses: spacing, unit round-off, one rounding.

A format has `digits` significand bits and the smallest subnormal eta = 2**`lowest`. The spacing of
its numbers at x, with 2**e <= |x| < 2**(e + 1), is max(2**(e - digits + 1), eta): IEEE 754-2019,
section 3.3 (bfloat16: float32 with its lower 16 bits cut off). All results are float64, in which
every value here is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class _Format(NamedTuple):
    digits: int
    lowest: int


_EXPONENT = 0x7FF << 52
"""The exponent bits of float64."""

_FORMATS = {
    torch.float32: _Format(24, -149),
    torch.bfloat16: _Format(8, -133),
    torch.float16: _Format(11, -24),
}


def _format(dtype: torch.dtype) -> _Format:
    if dtype not in _FORMATS:
        allowed = ", ".join(str(known) for known in _FORMATS)
        raise ValueError(f"dtype is {dtype} (allowed: {allowed})")
    return _FORMATS[dtype]


def unit_roundoff(dtype: torch.dtype = torch.float32) -> float:
    """Largest relative error of one rounding to nearest among normal numbers.

    2**-24 for float32, 2**-8 for bfloat16, 2**-11 for float16. ValueError for another dtype.
    """
    return 2.0 ** -_format(dtype).digits


def smallest_subnormal(dtype: torch.dtype = torch.float32) -> float:
    """The smallest positive number of `dtype`, eta.

    2**-149 for float32, 2**-133 for bfloat16, 2**-24 for float16. ValueError for another dtype.
    """
    return 2.0 ** _format(dtype).lowest


def half_ulp(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Half the spacing of the numbers of `dtype` at |x|: the largest error of rounding x to it.

    `x` has any shape and any real floating dtype, and need not be a number of `dtype`. The result
    has the same shape and is float64: eta / 2 among the subnormals and at zero, NaN where x is not
    finite. At a power of two it is the spacing above, and the exponent range has no upper end: for
    an x that overflows `dtype` it is what the spacing there would be.

    ValueError if `x` is not real floating, or for a dtype other than float32, bfloat16, float16.
    """
    digits, lowest = _format(dtype)
    if not x.dtype.is_floating_point:
        raise ValueError(f"x is {x.dtype} (allowed: a real floating dtype)")
    # The exponent bits of a float64 alone are 2**e, or 0 among its subnormals. torch.ldexp will
    # not do for what follows: it takes the power in float32, where 2**-150 is 0.
    wide = x.detach().to(torch.float64)
    half = (wide.view(torch.int64) & _EXPONENT).view(torch.float64)
    half.mul_(2.0**-digits).clamp_(min=2.0 ** (lowest - 1))
    return half.add_(wide - wide)  # 0 where x is finite, NaN elsewhere


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` rounded to `dtype` once, to nearest, ties to even. The result has the shape of `x`.

    `Tensor.to` goes from float64 to bfloat16 and float16 by way of float32, and so rounds twice.
    float64 is a dtype to round to as well. ValueError for another one, or if `x` is not real
    floating.
    """
    if dtype == torch.float64 and x.dtype.is_floating_point:
        return x.detach().to(dtype)
    spacing = 2.0 * half_ulp(x, dtype)
    wide = x.detach().to(torch.float64)
    # Quotient and product are exact, because the spacing is a power of two.
    exact = torch.round(wide / spacing) * spacing
    return torch.where(wide.isfinite(), exact, wide).to(dtype)
