"""Weights and buffers other than the case's, for a model before a checkpoint is loaded."""

from __future__ import annotations

import torch
from torch import nn

from ..case.schema import Case
from .layers import fill
from .seeds import SCRAMBLED, generator_of
from .user import vary_batch


@torch.no_grad()
def scramble(model: nn.Module, case: Case) -> None:
    """Change every element of every parameter and buffer, in place, the same on every rank.

    Parameters get numbers of their usual size, buffers are moved by 1, or negated where they are
    true or false. No element stays what it was, so whatever a load leaves alone is wrong. Buffers
    that are in no checkpoint (`persistent=False`) stay.
    """
    generator = generator_of(case.seed, SCRAMBLED)
    for name, parameter in model.named_parameters():
        if case.model.user is not None:
            parameter.copy_(vary_batch(parameter, generator))
            continue
        other = torch.empty_like(parameter)
        fill(name, other, generator)
        same = other == parameter
        parameter.copy_(torch.where(same, other + 1, other))
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set:
                continue
            if buffer.dtype == torch.bool:
                buffer.logical_not_()
            else:
                buffer.add_(1)
