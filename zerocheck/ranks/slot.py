"""Where a packed tensor lies in an arena. Small enough to travel inside a payload."""

from __future__ import annotations

import msgspec

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
