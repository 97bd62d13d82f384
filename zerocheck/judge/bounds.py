"""Error bounds of the judge: the distance of a correct execution from the exact result.

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

What is computed on the way is changed in place where nobody else has it: on a large model, memory
for one more float64 vector costs more than the operation.

No constant here is tuned: each counts roundings on the longest path of one term, over all the
kernels that torch has for it (for-loop, foreach, fused).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from zerocheck_reference import half_ulp, smallest_subnormal, unit_roundoff

U = unit_roundoff(torch.float32)
ETA = smallest_subnormal(torch.float32)
SECOND_ORDER = 1 + 1e-6
"""Products of two roundings are at most (30 u)^2 / u < 1e-4 u; 1e-6 relative covers them."""

Reading = Literal["double", "single rate", "single"]
"""How an optimizer reads its hyperparameters: as Python's doubles, or rounded to fp32 first."""
READINGS: tuple[Reading, ...] = ("double", "single rate", "single")


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


def rounded(exact: torch.Tensor, error: torch.Tensor, format: Format = FP32) -> Enclosure:
    """Enclose a result that is stored in `format`, after `error` has accumulated."""
    bound = half_ulp(exact.abs() + error, format.dtype)
    bound += error
    bound *= SECOND_ORDER
    return Enclosure(exact, bound)


def gradient_roundings(
    *,
    world_size: int,
    microbatches: int,
    average: str,
    divide: str,
    accumulate: str,
    mesh: Sequence[int] = (),
) -> int:
    """Count K, the roundings on the path of one term g_rm to the reduced gradient.

    A sum of N + M - 1 terms in any order rounds each term at most (N - 1) + (M - 1) times. Division
    by N is exact for a power of two; otherwise one division, or a multiplication by fl(1/N), which
    is rounded itself: 2. The same for 1/M where the gradient is divided and not the loss. With
    `reduce_each` each microbatch is reduced and divided, then added; DDP has the sum in its next
    reduction again, so each of these is counted once per microbatch, as for `reduce_again`.

    mesh: sizes of its axes, (N,) by default. Over (R, S), the sums over one axis and then over the
    other, in either order, round a term (R - 1) + (S - 1) times; one sum over all R S ranks rounds
    it R S - 1 times, which is no less and is counted. What is divided by N at once is rounded by
    one division. Who averages over one axis and then over the other divides twice, by R and by S:
    no less either, since N is a power of two only if both are. With `reduce_shards` a microbatch is
    reduced over S ranks and divided, added to others, and the sum reduced over R and divided: the
    path of one term has each of these once.
    """
    axes = tuple(mesh) or (world_size,)
    scale = 0 if average == "sum" else sum(roundings_of_division(axis) for axis in axes)
    if divide == "gradient":
        scale += roundings_of_division(microbatches)
    if accumulate == "reduce_shards":
        return sum(axis - 1 for axis in axes) + microbatches - 1 + scale
    if accumulate in ("reduce_each", "reduce_again"):
        return microbatches * (world_size - 1 + scale) + microbatches - 1
    return (world_size - 1) + (microbatches - 1) + scale


def roundings_of_division(count: int) -> int:
    """Return 0 for a power of two; else 2, as for multiplying by a rounded reciprocal."""
    return 0 if count & (count - 1) == 0 else 2


def gradient(
    exact: torch.Tensor, absolute: torch.Tensor, roundings: int, format: Format = FP32
) -> Enclosure:
    """K u / (1 - K u) * sum |g_rm| / N + K eta (Higham, section 4.2: any order of summation).

    exact: sum of g_rm / N; absolute: sum of |g_rm| / N; both float64.

    In bf16 K - 1 roundings leave (1 + u)^(K - 1) - 1 of the absolute sum, whatever K is, and the
    last one, of the whole result, at most h. K roundings to fp32 come on top: those of 1 / N, or of
    a sum that is taken in fp32 and cast at the end.
    """
    if not format.narrow:
        ku = roundings * U
        return Enclosure(exact, (ku / (1 - ku) * absolute + roundings * ETA) * SECOND_ORDER)
    if roundings == 0:
        return Enclosure(exact, torch.zeros_like(exact))
    before = math.expm1((roundings - 1) * math.log1p(format.u) + 2 * roundings * U)
    # What underflows is summed and rounded on.
    lost = roundings * format.eta * (1 + before)
    return rounded(exact, before * absolute + lost, format)


def along(
    exact: torch.Tensor,
    absolute: torch.Tensor,
    path: Sequence[tuple[int, Format]],
    scale: float = 1.0,
) -> Enclosure:
    """Enclose a gradient whose terms are rounded in several formats, one after the other.

    exact, absolute: as for `gradient`; path: (roundings, format) in the order in which a term comes
    to them; the last format is that of the result, or fp32. scale: all is multiplied by it until
    the end, so that less underflows; a power of two, which divides out exactly.

    In fp32 alone it is what `gradient` gives. Else k_i roundings in format i leave at most
    prod (1 + u_i)^k_i - 1 of the absolute sum, with 2 U in each exponent of a narrow format for
    what its operations round within them (see above). If the last format is narrow, its last
    rounding is of the whole result: h. What underflows is k_i eta_i, and is rounded on.
    """
    if not any(format.narrow for _, format in path):
        made = gradient(exact * scale, absolute * scale, sum(count for count, _ in path))
        return Enclosure(exact, made.bound / scale)
    *_, (_, last) = path
    exponent = sum(count * math.log1p(format.u) for count, format in path)
    exponent += sum(2 * count * U for count, format in path if format.narrow)
    if last.narrow:
        exponent -= math.log1p(last.u)
    before = math.expm1(exponent)
    lost = sum(count * format.eta for count, format in path) * (1 + before)
    error = before * scale * absolute + lost
    if last.narrow:
        return Enclosure(exact, rounded(exact * scale, error, last).bound / scale)
    return Enclosure(exact, error * (SECOND_ORDER / scale))


def norm_relative(elements: int) -> float:
    """Relative error of a 2-norm of `elements` numbers, summed in any order and any grouping.

    n - 1 additions and one product round the sum of squares by at most n u; the root halves it.
    Grouped norms (per tensor, then per rank) round once more at each of their roots and products:
    4 u. torch's own fp32 norm is thousands of u off on large tensors, within this bound.
    """
    return U * (elements / 2 + 4) * SECOND_ORDER


def narrow_norm_relative(elements: int, narrow: float, world_size: int, format: Format) -> float:
    """Relative error of a 2-norm with some gradients in `format`. narrow: their share of squares.

    torch computes the norm of a tensor in fp32 and rounds it to the tensor's dtype: u. A norm that
    is reduced over ranks in that dtype is squared (u), summed (u for each of W - 1), and its root
    is rounded (u); the root halves all but the last. If all gradients are narrow, so is the norm of
    their norms: u. Together (W / 2 + 3) u of the part of the norm that is narrow: with the share s
    of the squares, sqrt(1 + s ((1 + k u)^2 - 1)) - 1 of the whole. A tensor whose squares are
    summed one by one in its own dtype is outside: that sum stops growing at 2 / u terms.
    """
    off = math.expm1(-(world_size / 2 + 3) * math.log1p(-format.u))
    whole = math.sqrt(1 + narrow * ((1 + off) ** 2 - 1)) - 1
    return (1 + whole) * (1 + norm_relative(elements)) - 1


def clipped(
    gradient_: torch.Tensor,
    coefficient: float,
    format: Format = FP32,
    *,
    all_narrow: bool = False,
) -> Enclosure:
    """Enclose the gradient times the coefficient, given the reported norm.

    4 u: one addition of eps, a division that may be a reciprocal times the numerator (2), the cast
    of the numerator. Then the product is rounded: h. eta where it is subnormal.

    A gradient in bf16 is multiplied by a coefficient that is in fp32, or cast to bf16 first (FSDP1
    does): u. If all gradients are narrow, the norm and the coefficient are too (all_narrow): 3 u,
    for eps, the reciprocal and its product.
    """
    exact = gradient_ * coefficient
    if not format.narrow:
        return rounded(exact, 4 * U * exact.abs() + ETA)
    off = math.expm1(-(3 if all_narrow else 1) * math.log1p(-format.u) + 4 * U)
    return rounded(exact, off * exact.abs() + format.eta, format)


class Scalars(NamedTuple):
    """Hyperparameters and bias corrections of one step under one reading of the options.

    With the relative error that the reading's own arithmetic adds to the update.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    correction1: float
    correction2: float
    extra: float


def scalars(
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    reading: Reading,
) -> Scalars:
    """Compute bias corrections 1 - beta^t at step t >= 1.

    In double precision torch computes 1 - beta^t with a cancellation: 2^-53 / (1 - beta^t) relative
    each (half of it for the second, under the root), counted twice; it matters for betas near 1.
    Single precision rounds beta to fp32 and takes powf, which adds 2 u b^t / (1 - b^t) relative for
    each correction (half of it for the second, counted whole). A learning rate that is a tensor is
    the only one that is rounded ("single rate"); what is computed with it rounds as counted.
    """
    if reading == "single rate":
        lr = _single(lr)
    if reading == "single":
        lr, beta1, beta2, eps, weight_decay = (
            _single(value) for value in (lr, beta1, beta2, eps, weight_decay)
        )
    correction1, correction2 = correction(beta1, step), correction(beta2, step)
    extra = 2.0**-52 * (1 / correction1 + 1 / (2 * correction2))
    if reading == "single":
        extra += 2 * U * ((1 - correction1) / correction1 + (1 - correction2) / correction2)
    return Scalars(lr, beta1, beta2, eps, weight_decay, correction1, correction2, extra)


def _single(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def correction(beta: float, step: int) -> float:
    return 1.0 if beta == 0 else -math.expm1(step * math.log(beta))


def exp_avg(
    m: torch.Tensor,
    g: torch.Tensor,
    s: Scalars,
    g_error: torch.Tensor | float = 0.0,
    format: Format = FP32,
) -> Enclosure:
    """b1 m + (1 - b1) g, as multiply-add or as lerp.

    lerp m + w (g - m): the difference, the product and w are rounded: 3 u w |g - m|. Multiply-add:
    two roundings each of b1 m and (1 - b1) g. Then the sum: h. `g_error`: what is not known of g.

    In bf16 lerp is one operation, and adds nothing in u. Multiply-add is two, `mul_(b1)` and
    `add_(g, alpha=1 - b1)`: u b1 |m|, and u w |g|, as torch reads alpha in bf16.
    """
    w = 1 - s.beta1
    exact = s.beta1 * m
    exact += w * g
    lerp = (g - m).abs()
    lerp *= 3 * w
    q = 2 * s.beta1 * m.abs()
    q += 2 * w * g.abs()
    q = torch.maximum(lerp, q, out=q)
    q *= U
    q += 2 * format.eta + w * g_error
    if format.narrow:
        q += format.u * (s.beta1 * m.abs() + w * (g.abs() + g_error))
    return rounded(exact, q, format)


def exp_avg_sq(
    v: torch.Tensor,
    g: torch.Tensor,
    s: Scalars,
    g_error: torch.Tensor | float = 0.0,
    format: Format = FP32,
) -> Enclosure:
    """b2 v + (1 - b2) g^2: two roundings of the first term, three of the second, then the sum.

    In bf16 `mul_(b2)` is one operation, and `addcmul_` the other, whose own rounding is h. torch's
    `_foreach_mul_` reads b2 in bf16 too (0.999 is 1 there): 2 u b2 v.
    """
    w = 1 - s.beta2
    exact = w * g
    exact *= g
    exact += s.beta2 * v
    third = 3 * w * g
    third *= g
    q = 2 * s.beta2 * v.abs()
    q += third
    q *= U
    known = isinstance(g_error, float) and g_error == 0.0
    q += 2 * format.eta + (0.0 if known else w * g_error * (2 * g.abs() + g_error))
    if format.narrow:
        q += 2 * format.u * s.beta2 * v.abs()
    return rounded(exact, q, format)


def parameter(
    p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, s: Scalars, format: Format = FP32
) -> Enclosure:
    """p (1 - lr wd) - (lr / c1) m / (sqrt(v / c2) + eps), from the *observed* new m and v.

    v is max_exp_avg_sq with amsgrad. Decay: the factor and the product, 2 u. Update: step size,
    root, its division, eps, the division by the denominator and its product, 7 u on the longest
    path (two divisions may be reciprocals). lr m may underflow before the division: eta / den.

    In bf16 there are two forms. As operations: the decay, 2 u, since `_foreach_mul_` reads its
    factor in bf16; the root, its division, eps and (in torch's capturable form) the division by the
    step size each round the denominator, 4 u; addcdiv rounds at its end alone. Fused: all in fp32,
    but from m and v as they were before they were rounded to be stored, so that these are off by up
    to h each.
    """
    decayed = p * (1 - s.lr * s.weight_decay)
    denominator = (v / s.correction2).sqrt()
    denominator += s.eps
    update = s.lr / s.correction1 * m
    update /= denominator
    # 0 / 0 where neither a gradient nor eps ever was: torch gives NaN there too.
    q = (7 * U + s.extra) * update.abs()
    if format.narrow:
        q += torch.maximum(
            math.expm1(-4 * math.log1p(-format.u)) * update.abs(),
            _stored(m, v, s, format) - update.abs(),
        )
    if s.weight_decay != 0:
        q += 2 * format.u * decayed.abs()
    q += 2 * format.eta
    q += ETA / denominator
    return rounded(decayed - update, q, format)


def _stored(m: torch.Tensor, v: torch.Tensor, s: Scalars, format: Format) -> torch.Tensor:
    """Largest update that m and v can have given before they were rounded to be stored.

    It is farther from the update of the rounded ones than the smallest: the quotient is convex in v
    and the root concave. NaN and infinity become 0: there the update itself is none.
    """
    largest = m.abs() + half_ulp(m, format.dtype)
    least = (v - half_ulp(v, format.dtype)).clamp(min=0.0)
    update = s.lr / s.correction1 * largest / ((least / s.correction2).sqrt() + s.eps)
    return update.nan_to_num(nan=0.0, posinf=math.inf)
