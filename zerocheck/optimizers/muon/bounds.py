"""Error bounds of a step of Muon.

    b' = mu b + (1 - mu) g
    d  = mu b' + (1 - mu) g      of Nesterov, else b'
    O  = Newton-Schulz of d      in bfloat16, whole matrices alone
    p' = p (1 - lr wd) - lr r O

The buffer and the parameter are elementwise, and their bounds are derived as AdamW's are. O is not:
each of its 15 products of matrices is rounded to bfloat16, and the iteration maps singular values
by a polynomial whose slope at 0 is 3.4^5 = 485. A derived bound, the roundings of one step times
the slopes of all later ones, exceeds the matrix itself. So there are two readings. Where an
implementation has the whole matrix, and multiplies by the kernels of one device in the order of
torch.optim.Muon, O is that of the reference bit for bit, and the bound is derived. Else O is off by
what operators with round-off moved at random change in it (`execution/operator_noise.py`), and the
verdict is an estimate.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import NamedTuple

import torch

from zerocheck_reference import Adjustment, adjusted, orthogonalized

from ...execution.operator_noise import PartedNoise, round_off
from ...floating_point import FP32, Enclosure, Format, U, rounded
from ..specification import UpdateElements


class MuonScalars(NamedTuple):
    """Hyperparameters of one step. estimated: O may be another one within round-off."""

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    adjustment: Adjustment
    ns_steps: int
    estimated: bool


def momentum_buffer(
    b: torch.Tensor,
    g: torch.Tensor,
    momentum: float,
    g_error: torch.Tensor | float = 0.0,
    format: Format = FP32,
) -> Enclosure:
    """mu b + (1 - mu) g, as multiply-add or as lerp.

    lerp with the weight w = 1 - mu is b + w (g - b), or g - (1 - w) (g - b) for w from 1/2 on: the
    difference, the product and the factor are rounded, 3 u of the product; 1 - w may be off by u w
    more. Multiply-add: two roundings each of mu b and (1 - mu) g. Then the sum: h. In bf16 lerp is
    one operation; multiply-add is two, which read their factors in bf16: u of both terms.
    """
    w = 1 - momentum
    exact = momentum * b + w * g
    apart = (g - b).abs()
    lerp = (3 * min(w, momentum) + (w if w >= 0.5 else 0.0)) * apart
    error = U * torch.maximum(lerp, 2 * momentum * b.abs() + 2 * w * g.abs())
    error = error + 2 * format.eta + w * g_error
    if format.narrow:
        error = error + format.u * (momentum * b.abs() + w * (g.abs() + g_error))
    return rounded(exact, error, format)


def direction(e: UpdateElements, b: torch.Tensor, s: MuonScalars) -> torch.Tensor:
    """Return the matrix that is orthogonalized, as torch computes it, in the state's dtype."""
    g, buffer = (as_matrix(e, vector) for vector in (e.gradient, b))
    return g.lerp(buffer, s.momentum) if s.nesterov else buffer


def as_matrix(e: UpdateElements, vector: torch.Tensor) -> torch.Tensor:
    """Return elements of a whole parameter in its shape, dtype and order of memory."""
    return e.shaped(vector.to(e.format.dtype))


def parameter(e: UpdateElements, b: torch.Tensor, s: MuonScalars) -> Enclosure:
    """p (1 - lr wd) - lr r O, with O from the *observed* new buffer b and the gradient."""
    return stepped(e, *orthogonal(direction(e, b, s), s, e.parts), s)


def orthogonal(
    d: torch.Tensor,
    s: MuonScalars,
    parts: int = 1,
    *,
    steps: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Enclosure:
    """Enclose the flat O of a matrix d: exactly by the same kernels, else by an estimate.

    parts: of the matrix on different ranks, at most; steps: of Newton-Schulz, None: of the
    optimizer; dtype: of it.
    """

    count = s.ns_steps if steps is None else steps
    key = (d.shape, d.stride(), d.dtype, parts, count, dtype, s.estimated)
    for known, of, enclosure in _LAST:
        if known == key and torch.equal(of, d):
            return enclosure
    enclosure = _orthogonal(d, parts, count, dtype, estimated=s.estimated)
    _LAST.append((key, d.clone(), enclosure))
    return enclosure


_LAST: deque[tuple[object, torch.Tensor, Enclosure]] = deque(maxlen=2)
"""Matrices of the last calls: most changes of a step leave its direction as it is."""


def _orthogonal(
    d: torch.Tensor, parts: int, steps: int, dtype: torch.dtype, *, estimated: bool
) -> Enclosure:
    def made() -> torch.Tensor:
        return orthogonalized(d, steps=steps, dtype=dtype).reshape(-1)

    exact = made()
    if not estimated:
        return Enclosure(exact.double(), torch.zeros_like(exact, dtype=torch.float64))
    return Enclosure(
        exact.double(), round_off(made, exact, partial(PartedNoise, parts=parts), (exact.numel(),))
    )


def stepped(
    e: UpdateElements,
    update: torch.Tensor,
    off: torch.Tensor | float,
    s: MuonScalars,
    *,
    rate: float | None = None,
) -> Enclosure:
    """p (1 - lr wd) - lr r O, for a known O, which may be off by `off`.

    The factor of the decay and its product: 2 u; lr r and its product: 2 u, and in bf16 another 2,
    since for-loop kernels read their factors in bf16. Then the sum: h.
    """
    rate = s.lr * adjusted(e.shape, s.adjustment) if rate is None else rate
    decayed = e.parameter * (1 - s.lr * s.weight_decay)
    change = rate * update
    narrow = 2 * e.format.u if e.format.narrow else 0.0
    error = (2 * U + narrow) * (change.abs() + abs(rate) * off) + abs(rate) * off
    error = error + e.format.eta
    if s.weight_decay:
        error = error + 2 * e.format.u * decayed.abs()
    return rounded(decayed - change, error, e.format)
