"""Other weights and buffers than the case's: what a model has before a checkpoint is loaded."""

from __future__ import annotations

import torch
from torch import nn

from .layers import fill
from .seeds import SCRAMBLED, generator_of


@torch.no_grad()
def scramble(model: nn.Module, seed: int) -> None:
    """Change every element of every parameter and buffer, in place, the same on every rank.

    Parameters get numbers of their usual size, buffers are moved by 1. No element stays what it
    was, so whatever a load leaves alone is wrong.
    """
    generator = generator_of(seed, SCRAMBLED)
    for name, parameter in model.named_parameters():
        other = torch.empty_like(parameter)
        fill(name, other, generator)
        same = other == parameter
        parameter.copy_(torch.where(same, other + 1, other))
    for buffer in model.buffers():
        buffer.add_(1)
