"""Buffers that the script moves outside of the forward, such as the bias of a router of experts.

Running statistics move within the forward, by the rank's own samples. What the script moves after
it are values of the model, as parameters are: if they were equal on all ranks, they must stay so. A
buffer counts as the script's if it is in the state_dict, of a floating dtype, and no batch norm's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ...contract.names import unwrapped
from ..record.guard import around_forwards
from ..record.holdings import local
from ..record.repeatable import digest
from ..record.step_record import MovedBuffer


class BufferWatch:
    """Observation of the buffers of a model in one step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {name: digest([local(one)]) for name, one in _buffers(model)}
        self._seen = self._versions()
        self._moved: set[str] = set()
        self._called = False

    def hooked(self) -> ExitStack:
        """Observe the forwards; closing the stack ends it. A compiled model gets no hooks."""
        if not self._before or self._model._compiled_call_impl is not None:
            return ExitStack()
        return around_forwards(self._model, self._enter, self._leave)

    def _versions(self) -> dict[str, tuple[int, int]]:
        return {name: (id(one), one._version) for name, one in _buffers(self._model)}

    def _note(self) -> None:
        now = self._versions()
        self._moved |= {name for name, one in now.items() if self._seen.get(name, one) != one}

    def _enter(self, *_: Any) -> None:
        self._called = True
        self._note()

    def _leave(self, *_: Any) -> None:
        self._seen = self._versions()

    def found(self) -> tuple[MovedBuffer, ...]:
        """Return what was moved outside of the forward; nothing of a step without one."""
        self._note()
        moved = self._moved if self._called else ()
        return tuple(
            MovedBuffer(unwrapped(name), self._before[name], digest([local(one)]))
            for name, one in _buffers(self._model)
            if name in moved and name in self._before
        )


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        for name, one in module.named_buffers(recurse=False):
            own = name not in module._non_persistent_buffers_set and one.is_floating_point()
            if own and not isinstance(module, _NormBase):
                yield f"{path}.{name}" if path else name, one
