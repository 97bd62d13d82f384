"""Whole state of a trainer's state dict, by name and role."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from ...contract.names import named_buffers, unwrapped


def export_of(
    state: Mapping[str, torch.Tensor], names: Collection[str], model: nn.Module
) -> dict[tuple[str, str], torch.Tensor]:
    """Return the parameters and buffers of a state dict, by (name in the unwrapped model, role).

    names: of the parameters; model: wrapped, with the buffers. A second name of a shared parameter
    is left out.
    """
    buffers = {name for name, _ in named_buffers(model, None)}
    exported = {}
    for name, tensor in state.items():
        name = unwrapped(name)
        if name in names or name in buffers:
            exported[name, "buffer" if name in buffers else "parameter"] = tensor
    return exported
