"""Digests of tensors that do not depend on how they are sharded.

Each element is hashed with its place in the whole tensor, and hashes are added modulo 2^64: the sum
over the shards is that of the whole tensor, on any number of ranks. Two tensors that differ have
the same digest with a chance of about 2^-64, by accident; it is no protection against forgery.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import torch

from ...protocol.observations import Entry

BLOCKS = 16
"""Blocks of a tensor with digests of their own, which tell where a wrong one is wrong."""

CHUNK = {"cpu": 1 << 15}
"""Elements that are hashed at once, by kind of device: what a cache holds. On others 4 million."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_STEP = -7046029254386353131
"""2^64 over the golden ratio, which is odd: multiples of it lie far apart modulo 2^64."""


def mixed(words: torch.Tensor) -> torch.Tensor:
    """Mix the bits of each int64 in place, by multiplications with odd numbers and shifts."""
    words ^= words >> 32
    words *= _STEP
    words ^= words >> 29
    words *= -4658895280553007687
    words ^= words >> 32
    return words


def placed(bits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Hash elements with their places, both int64."""
    return mixed(index * _STEP + bits)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of each element as int64; those of a complex one are its two parts'."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype is torch.bool:
        return tensor.to(torch.int64)
    return tensor.view(_BITS[tensor.element_size()]).to(torch.int64)


class PartDigest(msgspec.Struct, frozen=True, array_like=True):
    """Digest of one rank's part of a tensor, or of the whole.

    entry: its place; dtype: name; blocks: by the block of the whole tensor, modulo 2^64; rounded:
    of all elements rounded to bf16; nonzero: number of elements that are not 0.
    """

    entry: Entry
    dtype: str
    blocks: tuple[int, ...]
    rounded: int
    nonzero: int

    @property
    def place(self) -> tuple[object, ...]:
        """Key of its elements, equal on all ranks that hold them."""
        return self.entry.start, self.entry.stop, self.entry.box

    @property
    def total(self) -> int:
        """Digest of all elements."""
        return sum(self.blocks) % 2**64

    @property
    def numel(self) -> int:
        """Number of elements of the part."""
        return self.entry.stop - self.entry.start


def digest_of(tensor: torch.Tensor, entry: Entry, *, rounds: bool = True) -> PartDigest:
    """Compute the digest of a part, on the tensor's own device, in chunks.

    rounds: with that of the rounded elements, which is 0 without.
    """
    flat = tensor.detach().reshape(-1)
    whole = max(1, math.prod(entry.shape))
    blocks = torch.zeros(BLOCKS, dtype=torch.int64, device=flat.device)
    rounded = torch.zeros((), dtype=torch.int64, device=flat.device)
    nonzero = torch.zeros((), dtype=torch.int64, device=flat.device)
    size = CHUNK.get(flat.device.type, 1 << 22)
    for low in range(0, flat.numel(), size):
        part = flat[low : low + size]
        index = _indices(entry, low, low + part.numel(), flat.device)
        hashes = placed(bits_of(part), index)
        first, last = (int(at) * BLOCKS // whole for at in (index[0], index[-1]))
        if first == last:  # places rise within a part
            blocks[first] += hashes.sum()
        else:
            blocks.index_add_(0, index * BLOCKS // whole, hashes)
        if rounds and part.dtype is torch.float32:
            rounded += placed(bits_of(part.to(torch.bfloat16).float()), index).sum()
        nonzero += part.count_nonzero()
    found = tuple(value % 2**64 for value in blocks.tolist())
    return PartDigest(entry, str(tensor.dtype), found, int(rounded) % 2**64, int(nonzero))


def _indices(entry: Entry, low: int, high: int, device: torch.device) -> torch.Tensor:
    """Return the places in the whole tensor of the local elements [low, high), in row-major."""
    rest = torch.arange(low, high, dtype=torch.int64, device=device)
    if entry.box is None:
        return rest + entry.start
    index, stride = torch.zeros_like(rest), 1
    for (first, end), size in zip(reversed(entry.box), reversed(entry.shape), strict=True):
        index += (rest % (end - first) + first) * stride
        rest = rest // (end - first)
        stride *= size
    return index


class WholeDigest(msgspec.Struct, frozen=True, array_like=True):
    """Digest of a whole tensor; fields as in PartDigest."""

    shape: tuple[int, ...]
    dtype: str
    blocks: tuple[int, ...]
    rounded: int
    nonzero: int

    @property
    def total(self) -> int:
        """Digest of all elements."""
        return sum(self.blocks) % 2**64

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def whole_of(parts: Iterable[PartDigest]) -> WholeDigest | None:
    """Merge parts, those in one place once; None if they are not all of the tensor."""
    once = {part.place: part for part in parts if part.numel}
    if not once:
        return None
    first = next(iter(once.values()))
    if sum(part.numel for part in once.values()) != math.prod(first.entry.shape):
        return None
    return WholeDigest(
        first.entry.shape,
        first.dtype,
        tuple(sum(block) % 2**64 for block in zip(*(p.blocks for p in once.values()), strict=True)),
        sum(part.rounded for part in once.values()) % 2**64,
        sum(part.nonzero for part in once.values()),
    )


def wrong_ranges(numel: int, one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of elements whose blocks differ: [start, stop)."""
    start = None
    for block in range(BLOCKS + 1):
        differs = block < BLOCKS and one[block] != other[block]
        at, end = (min(numel, -(-each * numel // BLOCKS)) for each in (block, block + 1))
        if block < BLOCKS and at == end:
            continue  # of few elements: nothing is in it
        if differs and start is None:
            start = at
        elif not differs and start is not None:
            yield start, at
            start = None
