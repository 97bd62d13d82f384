"""One file of torch.save: a state dict, or several in a mapping, of whole tensors.

It is read with `weights_only=True`: tensors, numbers, words and containers, and no classes of the
user. The tensors are mapped from the file, so memory holds what is looked at.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from ..errors import UsageError
from .records import has_checksums, load
from .source import DamagedCheckpoint, Key, OpenCheckpoint, leaves, whole, with_values


class TorchSave(OpenCheckpoint):
    """An opened file of torch.save; see `Source`."""

    format = "torch.save"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._held: dict[Key, torch.Tensor] = {}
        self._name = path.name
        if has_checksums(path):
            self.verified.append("every record of torch.save against its CRC-32")
        else:
            self.unverifiable.append("values (these files of torch.save have no checksums)")
        try:
            found = leaves(load(path, repr(str(path))))
        except DamagedCheckpoint as error:
            self.wrong("readable", path.name, str(error))
            return
        for way, leaf in found:
            key = way or ("the file",)
            if isinstance(leaf, DTensor):
                raise UsageError(
                    f"{str(path)!r} holds the shards of one rank (DTensor); give a full state "
                    "dict, or a directory of torch.distributed.checkpoint"
                )
            if isinstance(leaf, torch.Tensor):
                self._held[key] = leaf
                self.tensors[key] = whole(leaf)
            else:
                self.values[key] = leaf

    def read(self, key: Key) -> torch.Tensor:
        """See `Source.read`."""
        return with_values(self._held[key])

    def files_of(self, key: Key) -> frozenset[str]:
        """See `Source.files_of`."""
        return frozenset({self._name})
