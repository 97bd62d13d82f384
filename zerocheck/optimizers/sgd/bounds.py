"""Error bounds of a step of SGD.

    d  = g + weight_decay p
    b' = mu b + d            (d itself where there is no b yet: 0 in its place gives the same)
    n  = d, or b' with momentum, or d + mu b' in the form of Nesterov
    p' = p - lr n

torch has three kernels (torch/optim/sgd.py), which compute these four lines in this order:

- for-loop and foreach: `add(p, alpha=weight_decay)`, `mul_(mu)`, `add_(d, alpha=1)`,
  `add(b', alpha=mu)`, `add_(n, alpha=-lr)`, one operation each. The first buffer is a copy of d.
- fused: the same lines within one loop over the elements, where a product and its sum may be one
  operation (fma), which rounds less often.

Each reads weight_decay, mu and lr as fp32. Since there is no dampening, alpha=1 is exact. So the
longest path is: scalar (u), product (u), sum (u, or h where the sum is stored). No constant here
is tuned. Underflow adds eta for each product. A negated gradient is exact.

In bf16 for-loop and foreach read their scalars in bf16 (u), and round the product within `add` for
the elements that are left over from vectors (u; of vectors it is kept in fp32, 2 U). A sum that is
not stored has u. The fused kernel computes all in fp32, with the buffer as it was before it was
rounded to be stored, which is off by up to h(b'). At most six roundings in u follow on one another
before the last (of weight_decay and its product, d, n, lr and its product), so that the sum of them
all, times (1 + u)^5, covers their products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from zerocheck_reference import half_ulp

from ...floating_point import FP32, Enclosure, Format, rounded
from ..coupled_decay import Direction, decayed, product, stored


class SGDScalars(NamedTuple):
    """Hyperparameters of one step."""

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool


def momentum_buffer(
    p: torch.Tensor,
    b: torch.Tensor,
    g: torch.Tensor,
    s: SGDScalars,
    g_error: torch.Tensor | float = 0.0,
    format: Format = FP32,
) -> Enclosure:
    """mu b + d.

    Where there is no buffer yet, or 0 in it, the last rounding is that of d.
    """
    d = decayed(p, g, s.weight_decay, g_error, format)
    kept = s.momentum * b
    error = product(kept, format)
    if s.weight_decay != 0:
        error = error + format.u * (d.exact.abs() + d.error)
    error = torch.where(b == 0, 0.0, error)
    return rounded(kept + d.exact, grown(d.error + error, format), format)


def parameter(
    p: torch.Tensor,
    b: torch.Tensor,
    g: torch.Tensor,
    s: SGDScalars,
    g_error: torch.Tensor | float = 0.0,
    format: Format = FP32,
) -> Enclosure:
    """p - lr n, from the *observed* new buffer b, which counts with momentum alone."""
    n = direction(p, b, g, s, g_error, format)
    update = s.lr * n.exact
    error = product(update, format) + abs(s.lr) * n.error
    return rounded(p - update, grown(error, format), format)


def direction(
    p: torch.Tensor,
    b: torch.Tensor,
    g: torch.Tensor,
    s: SGDScalars,
    g_error: torch.Tensor | float = 0.0,
    format: Format = FP32,
) -> Direction:
    """n, with the roundings of all sums in it."""
    # The fused kernel has the buffer from before it was stored.
    unstored = half_ulp(b, format.dtype) if format.narrow else torch.zeros_like(b)
    if s.momentum != 0 and not s.nesterov:
        return Direction(b, unstored)
    d = decayed(p, g, s.weight_decay, g_error, format)
    d = stored(d, s.weight_decay, format)
    if s.momentum == 0:
        return d
    ahead = s.momentum * b
    exact = d.exact + ahead
    error = d.error + product(ahead, format) + s.momentum * unstored
    return Direction(exact, error + format.u * (exact.abs() + error))


def grown(error: torch.Tensor, format: Format) -> torch.Tensor:
    """First-order sum of errors, with their products where those count; fp32: see `rounded`."""
    return error * (1 + format.u) ** 5 if format.narrow else error
