"""Gradients that an optimizer has used, followed until they are cleared or added to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from ..record.holdings import Holding


@dataclass
class _Used:
    """gradient: the tensor; version: how often torch counted a change in place of it."""

    gradient: Any
    version: int
    added_to: bool = False


class UsedGradients:
    """Gradients of the last update of each parameter, by the parameter's id.

    A gradient that is set to None or filled with zeros before the next backward is forgotten. One
    that a backward adds to as it is, and that the optimizer then uses, was not cleared.
    """

    def __init__(self) -> None:
        self._used: dict[int, _Used] = {}

    def note(self, found: Iterable[Holding]) -> None:
        """Note the gradients of an update that was just made."""
        for holding, gradient in _gradients(found):
            self._used[id(holding.held)] = _Used(TensorWeakRef(gradient), gradient._version)

    def has(self, holding: Holding) -> bool:
        """Return True if a parameter has the gradient of its last update, unchanged."""
        used = self._used.get(id(holding.held))
        gradient = _of_rank(holding)
        return used is not None and used.gradient() is gradient and _same(used, gradient)

    def before_backward(self, found: Iterable[Holding]) -> None:
        """Forget what was cleared; a schedule may have scaled in place what it added to."""
        for holding in found:
            if id(holding.held) in self._used and not self.has(holding):
                used, gradient = self._used.pop(id(holding.held)), _of_rank(holding)
                if gradient is None or used.gradient() is not gradient or not used.added_to:
                    continue
                if bool(gradient.any()):
                    used.version = gradient._version
                    self._used[id(holding.held)] = used

    def after_backward(self, found: Iterable[Holding]) -> None:
        """Note what the backward added to."""
        for holding, gradient in _gradients(found):
            used = self._used.get(id(holding.held))
            if used is not None and used.gradient() is gradient and not _same(used, gradient):
                used.version, used.added_to = gradient._version, True

    def added_to(self, found: Iterable[Holding]) -> list[str]:
        """Return the names of parameters whose gradient includes that of their last update."""
        names = []
        for holding, gradient in _gradients(found):
            used = self._used.get(id(holding.held))
            added = used is not None and used.added_to and used.gradient() is gradient
            if added and bool(gradient.any()):
                names += [one.name for one in holding.shards("gradient", holding.held)]
        return names


def _gradients(found: Iterable[Holding]) -> Iterator[tuple[Holding, torch.Tensor]]:
    for holding in found:
        gradient = _of_rank(holding)
        if gradient is not None:
            yield holding, gradient


def _of_rank(holding: Holding) -> torch.Tensor | None:
    """Return the gradient itself, or the shard in a DTensor, of which torch counts the changes."""
    gradient = holding.held.grad
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def _same(used: _Used, gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient._version == used.version
