"""torch's layers without their initialization, and the values that parameters get instead.

Values come from `uniform_` alone: it is serial and made of additions and multiplications, so the
bits do not depend on the CPU's vector units, as those of `normal_` do.
"""

from __future__ import annotations

import math

import torch
from torch import nn


class Unfilled:
    """Base of layers whose parameters are initialized once, not twice."""

    def reset_parameters(self) -> None:
        """Do nothing: `fill` initializes the parameters."""


class ByChannel(nn.Module):
    """Base of layers that torch calls with (batch, channels, length)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, channels) -> (batch, length, width)."""
        outputs: torch.Tensor = super().forward(x.transpose(1, 2))
        return outputs.transpose(1, 2)


class Linear(Unfilled, nn.Linear):
    """nn.Linear, not filled."""


class Embedding(Unfilled, nn.Embedding):
    """nn.Embedding, not filled. Its padding row is not 0, so that its decay is seen."""


class Conv1d(Unfilled, ByChannel, nn.Conv1d):
    """nn.Conv1d over the length of (batch, length, width) activations."""


class LayerNorm(Unfilled, nn.LayerNorm):
    """nn.LayerNorm, not filled."""


class RMSNorm(Unfilled, nn.RMSNorm):
    """nn.RMSNorm, not filled. It has no bias."""


class GroupNorm(Unfilled, ByChannel, nn.GroupNorm):
    """nn.GroupNorm over (batch, length, width), with or without bias."""

    def __init__(self, groups: int, width: int, *, bias: bool) -> None:
        super().__init__(groups, width)
        if not bias:
            self.register_parameter("bias", None)


class BatchNorm1d(Unfilled, ByChannel, nn.BatchNorm1d):
    """nn.BatchNorm1d over (batch, length, width), with or without bias."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__(width)
        if not bias:
            self.register_parameter("bias", None)


class GRU(Unfilled, nn.GRU):
    """nn.GRU over (batch, length, width), from width to width, without its last state."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__(width, width, bias=bias, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Map (batch, length, width) to the same shape."""
        outputs: torch.Tensor = super().forward(x)[0]
        return outputs


def store_transposed(module: nn.Module) -> None:
    """Store every matrix of the module transposed, so that it is not contiguous.

    A matrix with a dim of size 1 stays as it is: it is contiguous either way.
    """
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter.dim() == 2 and min(parameter.shape) > 1:
                # nn.GRU keeps a list of its parameters, which its setattr keeps up to date.
                setattr(part, name, nn.Parameter(parameter.detach().t().contiguous().t()))


@torch.no_grad()
def fill(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Give a parameter or running statistic of this name its random values, in place.

    Nothing is 0: a bias or norm weight of 0 would hide a wrong weight decay. Matrices keep the
    variance of activations near 1/2 per layer, so that deep residual models stay finite. Values of
    a bf16 tensor are drawn in fp32 and rounded.
    """
    last = name.rpartition(".")[2]
    if tensor.numel() == 0:
        return
    if tensor.dtype != torch.float32:
        wide = torch.empty(tensor.shape, dtype=torch.float32)
        fill(name, wide, generator)
        tensor.copy_(wide)
        return
    if last.startswith("bias") or last == "running_mean":  # nn.GRU has bias_ih_l0, bias_hh_l0
        tensor.uniform_(0.1, 0.5, generator=generator)
        tensor[1::2].neg_()
    elif tensor.dim() <= 1:
        tensor.uniform_(0.5, 1.5, generator=generator)
    else:
        bound = math.sqrt(1.5 * tensor.shape[0] / tensor.numel())
        tensor.uniform_(-bound, bound, generator=generator)
