"""One file of torch.save: a state dict, or several in a mapping, of whole tensors.

It is read with `weights_only=True`: tensors, numbers, words and containers, and no classes of the
user. The tensors are mapped from the file, so memory holds what is looked at.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from ..errors import UsageError
from .records import load
from .source import Damaged, Key, Opened, leaves, whole


class TorchSave(Opened):
    """An opened file of torch.save; see `Source`."""

    format = "torch.save"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._held: dict[Key, torch.Tensor] = {}
        try:
            tree = load(path, repr(str(path)))
        except Damaged as error:
            self.wrong("readable", path.name, str(error))
            return
        for key, leaf in leaves(tree):
            if isinstance(leaf, DTensor):
                raise UsageError(
                    f"{str(path)!r} holds the shards of one rank (DTensor); give a full state "
                    "dict, or a directory of torch.distributed.checkpoint"
                )
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self._held[key] = leaf
                self.tensors[key] = whole(leaf)
            else:
                self.values[key] = leaf

    def read(self, key: Key) -> torch.Tensor:
        """See `Source.read`."""
        return self._held[key].detach()
