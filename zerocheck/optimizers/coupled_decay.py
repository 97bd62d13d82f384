"""Weight decay that is added to the gradient: the sum, and the error of its roundings.

    d = g + weight_decay p

torch's for-loop and foreach kernels compute it by `add(p, alpha=weight_decay)`, and fused ones
within their loop, where product and sum may be one operation (fma), which rounds less often. The
scalar is read as fp32 (u), and its product rounded (u); underflow adds eta. In bf16 for-loop and
foreach read the scalar in bf16 (u), and round the product within `add` for the elements that are
left over from vectors (u; of vectors it is kept in fp32, 2 U).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..floating_point import FP32, Format, U


class Direction(NamedTuple):
    """Vector with the error that has accumulated in it, before it is rounded to be stored."""

    exact: torch.Tensor
    error: torch.Tensor


def decayed(
    p: torch.Tensor,
    g: torch.Tensor,
    weight_decay: float,
    g_error: torch.Tensor | float = 0.0,
    format: Format = FP32,
) -> Direction:
    """Enclose g + weight_decay p, whose sum is not rounded yet."""
    if weight_decay == 0:
        return Direction(g, torch.zeros_like(g) + g_error)
    term = weight_decay * p
    error = product(term, format) + g_error
    return Direction(g + term, error)


def stored(d: Direction, weight_decay: float, format: Format) -> Direction:
    """Add the rounding of the sum; without weight decay there is no sum."""
    if weight_decay == 0:
        return d
    return Direction(d.exact, d.error + format.u * (d.exact.abs() + d.error))


def product(term: torch.Tensor, format: Format) -> torch.Tensor:
    """Error of a scalar times a tensor, from the exact product: that of both."""
    narrow = 2 * format.u if format.narrow else 0.0
    return (2 * U + narrow) * term.abs() + format.eta
