"""Muon of FSDP2's shards, written to be read: the momentum is gathered, every rank orthogonalizes.

    momentum     each rank averages the gradient into its rows of the buffer    no communication
    all-gather   every rank gets the whole direction                             P elements
    iterate      every rank orthogonalizes the whole matrix                      W times the work
    update       each rank takes its rows of it                                  no communication

The other way is that of the textbook ZeRO stages: each matrix has one owner, which has all of it
(`textbook/partition.py`, `whole`). It saves the repeated work, and the shards are less even.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...case.schema import Case
from ...compat import local_index
from ...contract import groups
from ...protocol.layout import Layout
from .adapter import Fsdp2

Options = Mapping[str, Any]


class GatheredMuon(torch.optim.Optimizer):
    """Muon over matrices that are DTensors, or whole; its groups are those of torch.optim.Muon."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr_fn: str = "original",
    ) -> None:
        """Take the parameters. Raises ValueError for one that is no matrix."""
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for one in group["params"]:
                if one.ndim != 2:
                    raise ValueError(f"a parameter has the shape {tuple(one.shape)}; needed: 2-D")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    def update(self, p: torch.Tensor, group: Options) -> None:
        """Update one matrix."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer, gradient = state["momentum_buffer"], p.grad
        assert gradient is not None
        self.average(buffer, gradient, p, group)
        matrix = self.orthogonalized(self.direction(buffer, gradient, group), p)
        mine = self.rows_of(matrix, p)
        shard = local(p)
        shard.mul_(1 - self.decay(p, group))
        shard.add_(mine, alpha=-self.rate(p, group))

    def average(
        self, buffer: torch.Tensor, gradient: torch.Tensor, p: torch.Tensor, group: Options
    ) -> None:
        """Take the gradient into the buffer, shard by shard."""
        local(buffer).lerp_(local(gradient), 1 - group["momentum"])

    def direction(
        self, buffer: torch.Tensor, gradient: torch.Tensor, group: Options
    ) -> torch.Tensor:
        """Return the matrix to orthogonalize, sharded as the buffer is."""
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def orthogonalized(self, direction: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Return the whole orthogonalized matrix, on every rank."""
        return newton_schulz(self.gathered(direction))

    def gathered(self, direction: torch.Tensor) -> torch.Tensor:
        """Return the whole matrix."""
        return direction.full_tensor() if isinstance(direction, DTensor) else direction

    def rows_of(self, matrix: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole matrix."""
        if not isinstance(p, DTensor):
            return matrix
        return matrix[local_index(p)]

    def decay(self, p: torch.Tensor, group: Options) -> float:
        """Return what weight decay takes off a parameter, relative to it."""
        return float(group["lr"] * group["weight_decay"])

    def rate(self, p: torch.Tensor, group: Options) -> float:
        """Return the learning rate, by the shape of the whole matrix."""
        factor: float = group["lr"] * shape_factor(p.shape, group["adjust_lr_fn"])
        return factor


def newton_schulz(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return the matrix with singular values near 1, in bf16.

    With the coefficients of Jordan et al. (2024), who chose them for the largest slope at 0.
    """
    x = matrix.to(torch.bfloat16, copy=True)  # a matrix in bf16 is not to be divided itself
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=1e-7))
    for _ in range(steps):
        square = x @ x.T
        change = torch.addmm(square, square, square, beta=-4.775, alpha=2.0315)
        x = torch.addmm(x, change, x, beta=3.4445)
    return x.T if tall else x


def shape_factor(shape: Sequence[int], rule: str) -> float:
    """Return the factor on the learning rate of a matrix, by the rule of `adjust_lr_fn`."""
    rows, columns = shape
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Fsdp2Muon(Fsdp2):
    """`fully_shard`, with `GatheredMuon` for matrices and AdamW for all else."""

    # Made after the model is sharded, as torch wants it.
    options: ClassVar[tuple[str, ...]] = tuple(
        one for one in Fsdp2.options if one != "optimizer_first"
    )
    fixed: ClassVar[Mapping[str, Any]] = {"optimizer": {"kind": "muon"}}

    @classmethod
    def layout(cls, model: nn.Module, case: Case, rank: int) -> Layout | None:
        """Return None: what the gathered matrices hold and move is not predicted."""
        return None

    def make_optimizer(self, model: nn.Module, case: Case) -> Any:
        muon = GatheredMuon(groups(model, case, "muon"))
        return [muon, torch.optim.AdamW(groups(model, case, "adamw"))]
