"""Bytes of activations: what the forwards made, and the backward needs, when it begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..compat import Operators, in_backward
from ..compat_memory import storage_key


class Activations(Operators):
    """Dispatch mode that weighs the storages which the operators of a forward made.

    bytes: those that still exist at the first operator of a backward, the most of any microbatch;
    None before one. Outputs, the loss and its own gradient are among them. Parameters that are
    gathered into storages of an earlier step are not, nor what FSDP has freed by then. None where a
    tensor has no storage, as sparse ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: int | None = None
        self._made: dict[StorageWeakRef, None] = {}
        self._backward = self._broken = False

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        backward = in_backward()
        if backward and not self._backward and not self._broken:
            self.bytes = max(self.bytes or 0, self._weigh())
        self._backward = backward
        result = func(*args, **kwargs)
        if not backward and not self._broken:
            self._note(args, kwargs, result)
        return result

    def _note(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Keep the storages that an operator made; not for tensors that have none."""
        try:
            given = {storage_key(one) for one in _tensors((*args, *kwargs.values()))}
            for one in _tensors(result if isinstance(result, list | tuple) else (result,)):
                if storage_key(one) not in given:  # or it is a view, of a parameter for example
                    reference: Any = StorageWeakRef
                    self._made[reference(one.untyped_storage())] = None
        except (RuntimeError, NotImplementedError):
            self._broken, self.bytes = True, None

    def _weigh(self) -> int:
        alive = {}
        for reference in self._made:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                alive[storage._cdata] = storage.nbytes()
        self._made.clear()
        return sum(alive.values())


def _tensors(given: Sequence[Any]) -> Iterator[torch.Tensor]:
    for one in given:
        if isinstance(one, list | tuple):
            yield from _tensors(one)
        elif isinstance(one, torch.Tensor) and type(one) in (torch.Tensor, nn.Parameter):
            yield one
