"""Model of rounding: formats, enclosures, and the last rounding of a result.

The standard model of rounding (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
section 2.2): fl(a op b) = (a op b)(1 + d) + e with |d| <= u and |e| <= eta; u = 2^-24 and eta =
2^-149 for fp32. `h(x)` is half the spacing at |x|: what the last rounding can do, taken at |exact|
plus all other error terms, since a binade can be crossed. For fp32 every bound is first order,
times SECOND_ORDER. Everything is computed in float64, whose own round-off is 2^-29 of fp32's.

bf16 tensors (u = 2^-8, eta = 2^-133) are computed with in fp32 and rounded once per operation: the
sums of gloo, `mul`, `sqrt`, `div`, `add`. `lerp`, `addcmul` and `addcdiv` are one operation each,
and the fused kernel is one for all. So a bound counts operations in u, and what happens within them
in U, the round-off of fp32. With u this large a first order will not do: k roundings of one factor
are (1 + u)^k - 1 there, or 1 / (1 - u)^k - 1 in a denominator. The products of a u and a U that are
left out are below (30 U) u; a rounding to nearest is at most u / (1 + u), and the u^2 between that
and the u that is counted is 2000 times as much.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from zerocheck_reference import half_ulp, smallest_subnormal, unit_roundoff

U = unit_roundoff(torch.float32)
ETA = smallest_subnormal(torch.float32)
SECOND_ORDER = 1 + 1e-6
"""Products of two roundings are at most (30 u)^2 / u < 1e-4 u; 1e-6 relative covers them."""
NEXT = 2
"""Units of round-off to the number next to it."""


class Format(NamedTuple):
    """Storage format of a tensor: its dtype, unit round-off u and smallest subnormal eta."""

    dtype: torch.dtype
    u: float
    eta: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Format:
        """Return the format of float32, bfloat16 or float16. ValueError for another dtype."""
        return cls(dtype, unit_roundoff(dtype), smallest_subnormal(dtype))

    @property
    def narrow(self) -> bool:
        """True if the format is narrower than fp32, in which its operations compute."""
        return self.u > U


FP32 = Format.of(torch.float32)
BF16 = Format.of(torch.bfloat16)


class Enclosure(NamedTuple):
    """Per element, [exact - bound, exact + bound], float64."""

    exact: torch.Tensor
    bound: torch.Tensor


def all_inside(observed: torch.Tensor, wanted: Enclosure) -> bool:
    """Return True if every element is within its bound; NaN is not."""
    return bool(((observed - wanted.exact).abs() <= wanted.bound).all())


def rounded(exact: torch.Tensor, error: torch.Tensor, format: Format = FP32) -> Enclosure:
    """Enclose a result that is stored in `format`, after `error` has accumulated."""
    bound = half_ulp(exact.abs() + error, format.dtype)
    bound += error
    bound *= SECOND_ORDER
    return Enclosure(exact, bound)
