"""Error bounds of gradients and norms: the distance of a correct execution from the exact result.

The model of rounding is that of `zerocheck/floating_point.py`. No constant here is tuned: each
counts roundings on the longest path of one term, over all the kernels that torch has for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..case.mesh import Mesh
from ..floating_point import ETA, FP32, SECOND_ORDER, Enclosure, Format, U, rounded


def gradient_roundings(
    *,
    world_size: int,
    microbatches: int,
    average: str,
    divide: str,
    accumulate: str,
    mesh: Mesh | None = None,
) -> int:
    """Count K, the roundings on the path of one term g_rm to the reduced gradient.

    A sum of N + M - 1 terms in any order rounds each term at most (N - 1) + (M - 1) times. Division
    by N is exact for a power of two; otherwise one division, or a multiplication by fl(1/N), which
    is rounded itself: 2. The same for 1/M where the gradient is divided and not the loss. With
    `reduce_each` each microbatch is reduced and divided, then added; DDP has the sum in its next
    reduction again, so each of these is counted once per microbatch, as for `reduce_again`.

    mesh: by default all ranks hold one copy. Of R copies, each on S ranks, the sums over one axis
    and then over the other, in either order, round a term (R - 1) + (S - 1) times; one sum over all
    R S ranks rounds it R S - 1 times, which is no less and is counted. What is divided by N at once
    is rounded by one division. Who averages over one axis and then over the other divides twice, by
    R and by S: no less either, since N is a power of two only if both are. With `reduce_shards` a
    microbatch is reduced over S ranks and divided, added to others, and the sum reduced over R and
    divided: the path of one term has each of these once.
    """
    sizes = (world_size,) if mesh is None else stages(mesh)
    scale = 0 if average == "sum" else sum(roundings_of_division(size) for size in sizes)
    if divide == "gradient":
        scale += roundings_of_division(microbatches)
    if accumulate == "reduce_shards":
        return sum(size - 1 for size in sizes) + microbatches - 1 + scale
    if accumulate in ("reduce_each", "reduce_again"):
        return microbatches * (world_size - 1 + scale) + microbatches - 1
    return (world_size - 1) + (microbatches - 1) + scale


def stages(mesh: Mesh) -> tuple[int, int]:
    """Return the sizes R and S of the groups over which gradients are summed: copies, and shards.

    S counts the ranks of tensor parallelism too: the reference sums over all of them.
    """
    return mesh.size("replicate"), mesh.parts("parameters")


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
    error = math.expm1(-(world_size / 2 + 3) * math.log1p(-format.u))
    whole = math.sqrt(1 + narrow * ((1 + error) ** 2 - 1)) - 1
    return (1 + whole) * (1 + norm_relative(elements)) - 1


def clipped(
    gradient_: torch.Tensor, coefficient: float, format: Format = FP32, *, all_narrow: bool = False
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
    error = math.expm1(-(3 if all_narrow else 1) * math.log1p(-format.u) + 4 * U)
    return rounded(exact, error * exact.abs() + format.eta, format)
