"""Arenas as the parent maps them, and the slots in which tensors are packed.

Imports torch only when a tensor is asked for. A slot is small enough to travel inside a payload.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 64
"""Bytes. Every slot starts at a multiple of it, so that vectorised kernels see aligned data."""

KEPT_BYTES = 256 << 20
"""A larger arena is given back when its job is done; others keep their pages."""


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """`numel` elements of `dtype` ("float32", "bfloat16", ...) from byte `offset` on."""

    offset: int
    numel: int
    dtype: str


def align(offset: int) -> int:
    """The first slot offset at or after `offset` (bytes)."""
    return (offset + ALIGNMENT - 1) & -ALIGNMENT


class ArenaView:
    """View of the tensors that one rank put, without a copy.

    The tensors are views of shared memory: they are to be read until the result is released, and
    later they show whatever a later job puts. Writing to them spoils this result only.
    """

    def __init__(self, mapping: mmap.mmap | bytearray | None) -> None:
        self._mapping = mapping

    def tensor(self, slot: Slot) -> Tensor:
        """The slot as a flat tensor. Raises ValueError when it lies outside of the arena."""
        import torch

        dtype = getattr(torch, slot.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"no such dtype: {slot.dtype!r}")
        if slot.numel == 0:
            return torch.empty(0, dtype=dtype)
        end = slot.offset + slot.numel * dtype.itemsize
        if self._mapping is None or slot.offset < 0 or slot.numel < 0 or end > len(self._mapping):
            raise ValueError(f"{slot} lies outside of the arena")
        return torch.frombuffer(self._mapping, dtype=dtype, count=slot.numel, offset=slot.offset)


class Mappings:
    """Maps arena files, and keeps a mapping while the rank reuses the file."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[str, int, mmap.mmap]] = {}

    def view(self, rank: int, arena: int, path: str, size: int) -> ArenaView:
        """Raises OSError when the file is gone. An empty path is an arena that was not used."""
        if not path:
            return ArenaView(None)
        known = self._known.get((rank, arena))
        if known is None or known[:2] != (path, size):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                known = (path, size, mmap.mmap(descriptor, size))
            finally:
                os.close(descriptor)
            # The old mapping is dropped and not closed: tensors may still look at it.
            self._known[rank, arena] = known
        return ArenaView(known[2])

    def forget_large(self, arena: int) -> None:
        """Give back the memory of large arenas of that number at once: they are not filled again.

        Whoever still looks at one sees zeros.
        """
        for key, (_, size, mapping) in list(self._known.items()):
            if key[1] == arena and size > KEPT_BYTES:
                del self._known[key]
                with contextlib.suppress(OSError, ValueError):  # a file system without holes
                    mapping.madvise(mmap.MADV_REMOVE)
