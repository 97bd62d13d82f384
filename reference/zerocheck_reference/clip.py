"""The norm of a gradient, and the factor that clipping multiplies it by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from ._check import one_of, real

ClipRule = Literal["min(1, c/(norm+eps))", "c/norm if norm>c"]
CLIP_RULES: tuple[ClipRule, ...] = get_args(ClipRule)
"""How the factor comes from the norm; the first is torch.nn.utils.clip_grad_norm_'s."""


@torch.no_grad()
def gradient_norm(gradients: Sequence[Tensor], *, p: float = 2.0) -> Tensor:
    """The norm of all `gradients` as one vector, as a 0-d float64 tensor on the CPU.

    p is 2.0, sqrt(sum g^2), or inf, max |g|; ValueError otherwise. The tensors have any shapes and
    real floating dtypes. No tensors, or empty ones only, have the norm 0. A NaN anywhere gives
    NaN; otherwise an infinity gives inf.

    It is computed in float64. Elements are first scaled by a power of two, which is exact, so that
    no square overflows. One rounding of a square, at most n - 1 of the additions and one of the
    root leave a relative error below (n + 2) 2**-53 for n elements: less than float32's unit
    round-off for 5e8 elements in any order of summation, and torch sums by cascade.
    """
    if p not in (2.0, math.inf):
        raise ValueError(f"p is {p!r} (allowed: 2.0, inf)")
    tensors = [gradient.detach() for gradient in gradients if gradient.numel()]
    peak = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        peak = torch.maximum(peak, tensor.abs().amax().to("cpu", torch.float64))
    largest = peak.item()
    if p == math.inf or largest == 0.0 or not math.isfinite(largest):
        return peak
    # Bounded, so that the scale of a subnormal peak is finite; its square is then still normal.
    scale = 2.0 ** min(-math.frexp(largest)[1], 1000)
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        total += (tensor.to(torch.float64) * scale).square().sum().cpu()
    return total.sqrt() / scale


def clip_coefficient(
    norm: float, max_norm: float, *, rule: ClipRule = "min(1, c/(norm+eps))", eps: float = 1e-6
) -> float:
    """The factor by which a gradient of norm `norm` is multiplied, for the maximum c = `max_norm`.

    "min(1, c/(norm+eps))"  torch.nn.utils.clip_grad_norm_; NaN if the norm is NaN
    "c/norm if norm>c"      and 1 otherwise, also if the norm is NaN; `eps` has no part in it

    Computed in float64. `norm` is in [0, inf] or NaN, `max_norm` in [0, inf] and `eps` in
    [0, inf), all in units of the gradient. ValueError otherwise, or for an unknown rule.
    """
    one_of("rule", rule, CLIP_RULES)
    if not math.isnan(norm):
        real("norm", norm, high_open=False)
    real("max_norm", max_norm, high_open=False)
    real("eps", eps)
    if rule == "c/norm if norm>c":
        return max_norm / norm if norm > max_norm else 1.0
    if math.isnan(norm) or (math.isinf(norm) and math.isinf(max_norm)):
        return math.nan
    if norm + eps == 0.0:
        return 1.0 if max_norm > 0.0 else math.nan
    # min() of Python would drop a NaN, but there is none left.
    return min(1.0, max_norm / (norm + eps))
