"""One step of Muon, momentum that is orthogonalized by Newton-Schulz, written from the equations.

After Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), and, for the
rule `match_rms_adamw` and the decoupled decay, Liu et al., "Muon is Scalable for LLM Training"
(2025, arXiv 2502.16982). Where they leave a choice, it is what torch.optim.Muon computes: the
momentum is an average (dampened by 1 - momentum), the iteration runs in bfloat16, with the
coefficients of the first, and the decay takes the learning rate without its adjustment.

With g the gradient of a matrix of A rows and B columns, and mu the momentum:

    b     <- mu b + (1 - mu) g
    d     <- mu b + (1 - mu) g  of Nesterov, with the new b; else b
    X     <- d / max(|d|, eps)  Frobenius norm; transposed if A > B, so that X X^T is the small one
    X     <- a X + (b' S + c S S) X  with S = X X^T, `ns_steps` times
    p     <- p (1 - lr weight_decay)
    p     <- p - lr r X         r = sqrt(max(1, A / B)), or 0.2 sqrt(max(A, B))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ._check import flag, real
from .optimizer import OptimizerState

Adjustment = Literal["original", "match_rms_adamw"]
"""Rule by which the learning rate follows the shape of a matrix."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b' and c of the iteration, chosen by Jordan et al. for the largest slope at 0."""

EPS = 1e-7
"""Smallest norm that a matrix is divided by."""


@dataclass(frozen=True, kw_only=True)
class MuonOptions:
    """The scalars of Muon for one group of matrices.

    lr            learning rate, in [0, inf)
    momentum      share of the old buffer in the new one, in [0, 1)
    weight_decay  decoupled decay per unit of the learning rate, in [0, inf)
    nesterov      orthogonalize the average of the gradient and the new buffer
    adjustment    how the learning rate follows the shape
    ns_steps      iterations of Newton-Schulz, at least 1

    Raises ValueError for a value outside of these, NaN included.
    """

    lr: float = 1e-3
    momentum: float = 0.95
    weight_decay: float = 0.1
    nesterov: bool = True
    adjustment: Adjustment = "original"
    ns_steps: int = 5

    def __post_init__(self) -> None:
        real("lr", self.lr)
        real("momentum", self.momentum, high=1.0)
        real("weight_decay", self.weight_decay)
        flag("nesterov", self.nesterov)
        if self.adjustment not in get_args(Adjustment):
            allowed = ", ".join(get_args(Adjustment))
            raise ValueError(f"adjustment is {self.adjustment!r} (allowed: {allowed})")
        if isinstance(self.ns_steps, bool) or not isinstance(self.ns_steps, int):
            raise ValueError(f"ns_steps is {self.ns_steps!r} (allowed: an integer from 1 on)")
        if self.ns_steps < 1:
            raise ValueError(f"ns_steps is {self.ns_steps} (allowed: 1 or more)")

    def initial(self, parameter: Tensor) -> MuonState:
        """Return the state before the first step: a copy of `parameter`, and a buffer of zeros."""
        state = MuonState(parameter.detach().clone(), torch.zeros_like(parameter))
        check_muon_state(state)
        return state

    def check(self, state: OptimizerState) -> None:
        """Raise ValueError unless `state` is a sound one of Muon."""
        check_muon_state(_of_muon(state))

    def after(self, state: OptimizerState, gradient: Tensor) -> MuonState:
        """Return the state after one step."""
        return muon_step(_of_muon(state), gradient, self)


class MuonState(NamedTuple):
    """All that Muon knows of one matrix, (..., A, B); dims before these are a stack of matrices.

    parameter        p, after the steps so far
    momentum_buffer  b; zeros before the first step

    Both have one shape and one floating dtype.
    """

    parameter: Tensor
    momentum_buffer: Tensor

    def copy(self) -> MuonState:
        """Return a state that shares no memory with this one."""
        return MuonState(self.parameter.detach().clone(), self.momentum_buffer.detach().clone())


def _of_muon(state: OptimizerState) -> MuonState:
    if not isinstance(state, MuonState):
        raise ValueError(f"the state is {type(state).__name__} (allowed: MuonState)")
    return state


def check_muon_state(state: MuonState) -> None:
    """Raise ValueError unless `state` is sound."""
    p, buffer = state
    if not p.dtype.is_floating_point:
        raise ValueError(f"parameter is {p.dtype} (allowed: a real floating dtype)")
    if p.dim() < 2:
        raise ValueError(f"parameter has {p.dim()} dims (allowed: a matrix, or a stack of them)")
    if buffer.shape != p.shape or buffer.dtype != p.dtype:
        raise ValueError(
            f"momentum_buffer is {buffer.dtype} of shape {tuple(buffer.shape)} "
            f"(allowed: as the parameter, {p.dtype} of shape {tuple(p.shape)})"
        )


@torch.no_grad()
def muon_step(state: MuonState, gradient: Tensor, options: MuonOptions) -> MuonState:
    """Return the state after one step from `state` with `gradient`.

    `gradient` has the parameter's shape. It is converted to the dtype of the state, in which all
    but the iteration is computed. Nothing is changed in place.

    ValueError for tensors that do not fit each other, or a gradient of a wider dtype than the state
    (it would be rounded).
    """
    check_muon_state(state)
    p, old = state
    if gradient.shape != p.shape or torch.promote_types(gradient.dtype, p.dtype) != p.dtype:
        raise ValueError(
            f"gradient is {gradient.dtype} of shape {tuple(gradient.shape)} "
            f"(allowed: shape {tuple(p.shape)} and a dtype that {p.dtype} holds exactly)"
        )
    g = gradient.to(p.dtype)
    buffer = old.lerp(g, 1 - options.momentum)
    direction = g.lerp(buffer, options.momentum) if options.nesterov else buffer
    update = orthogonalized(direction, steps=options.ns_steps).to(p.dtype)
    rate = options.lr * adjusted(p.shape, options.adjustment)
    return MuonState(p * (1 - options.lr * options.weight_decay) - rate * update, buffer)


def adjusted(shape: torch.Size | tuple[int, ...], adjustment: Adjustment) -> float:
    """Return the factor on the learning rate of a matrix of this shape, of its last two dims."""
    rows, columns = shape[-2:]
    if adjustment == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def orthogonalized(
    direction: Tensor,
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = EPS,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return U S' V^T of a matrix U S V^T, with each of S' near 1, by Newton-Schulz.

    direction: (..., A, B), any floating dtype. The result has its shape, and `dtype`, in which the
    iteration runs, in the order of operations of torch.optim.Muon.
    """
    a, b, c = coefficients
    x = direction.to(dtype)
    tall = direction.size(-2) > direction.size(-1)
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    multiply, add = (torch.addmm, torch.mm) if x.dim() == 2 else (torch.baddbmm, torch.matmul)
    for _ in range(steps):
        gram = add(x, x.mT)
        update = multiply(gram, gram, gram, beta=b, alpha=c)
        x = multiply(x, update, x, beta=a)
    return x.mT if tall else x
