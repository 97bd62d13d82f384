"""Where the parameters lay that forward read, modulo 64 bytes.

BLAS takes another path for weights that are not aligned, and its roundings differ. The judge puts
the reference's parameters at the same places, so that local gradients agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

ALIGNMENT = 64
"""Bytes; the widest vector that CPU kernels load at once."""


class AlignmentProbe:
    """Notes `address % 64` of every parameter when its module has just run.

    It uses torch's global forward hook, which runs before the model's own forward hooks, so
    before FSDP releases what it gathered. No hook is put on the user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        """`model` before it is wrapped: wrapping keeps the module objects."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._names: dict[nn.Module, dict[str, str]] = {
            module: {
                attribute: names[parameter]
                for attribute, parameter in module._parameters.items()
                if parameter is not None
            }
            for module in model.modules()
            if any(parameter is not None for parameter in module._parameters.values())
        }
        self.misaligned: dict[str, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes while it is open."""
        handle = register_module_forward_hook(self._note)
        try:
            yield
        finally:
            handle.remove()

    def _note(self, module: nn.Module, *_: Any) -> None:
        names = self._names.get(module)
        if names is None:
            return
        for attribute, name in names.items():
            tensor = getattr(module, attribute, None)
            if isinstance(tensor, torch.Tensor) and type(tensor) in _PLAIN:
                offset = tensor.data_ptr() % ALIGNMENT
                if offset:
                    self.misaligned[name] = offset


_PLAIN = (torch.Tensor, nn.Parameter)


def place(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy of the tensor whose address is `offset` modulo 64. Same shape and dtype."""
    size = tensor.element_size()
    spare = torch.empty(tensor.numel() + 2 * ALIGNMENT // size, dtype=tensor.dtype)
    start = ((offset - spare.data_ptr()) % ALIGNMENT) // size
    copy = spare[start : start + tensor.numel()].view(tensor.shape)
    return copy.copy_(tensor)
