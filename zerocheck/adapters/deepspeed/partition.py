"""One rank's partition of a flat group, as shards of the parameters, without communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ...contract import Shard
from ...contract.shard import Role

Full = Mapping[tuple[str, str], torch.Tensor]


class PartitionPiece(NamedTuple):
    """Elements [start, stop) of a parameter, from `offset` on in this rank's partition."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int


class GroupPartition(NamedTuple):
    """This rank's part of a flat group of parameters.

    master: what the optimizer updates, 1-D; pieces: whose elements it holds, in their order.
    """

    master: torch.Tensor
    pieces: list[PartitionPiece]

    def shards(self, role: Role, *tensors: torch.Tensor) -> Iterator[Shard]:
        """Iterate over the pieces of tensors that, end to end, are laid out like the partition."""
        begin = 0
        for tensor in tensors:
            end = begin + tensor.numel()
            for piece in self.pieces:
                low = max(begin, piece.offset)
                high = min(end, piece.offset + piece.stop - piece.start)
                if low < high:
                    start = piece.start + low - piece.offset
                    data = tensor.detach().reshape(-1)[low - begin : high - begin]
                    place = slice(start, start + high - low)
                    yield Shard(piece.name, role, data, piece.shape, place)
            begin = end

    def fill(self, into: torch.Tensor, full: Full, role: Role) -> None:
        """Write this rank's pieces of whole tensors."""
        for piece in self.pieces:
            end = piece.offset + piece.stop - piece.start
            whole = full[piece.name, role].reshape(-1)
            into[piece.offset : end].copy_(whole[piece.start : piece.stop])


class PlacedPiece(NamedTuple):
    """Tensor stored inside a flat one: its offset and its length in elements."""

    name: str
    at: int
    numel: int


def lying_in(flat: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> list[PlacedPiece]:
    """Find the tensors that are views of a flat one by their addresses, sorted by offset.

    DeepSpeed's own records of its layout are not used, so that a wrong record is detected.
    """
    size = flat.element_size()
    begin, end = flat.data_ptr(), flat.data_ptr() + flat.numel() * size
    found = [
        PlacedPiece(name, (tensor.data_ptr() - begin) // size, tensor.numel())
        for name, tensor in tensors.items()
        if tensor.numel() and begin <= tensor.data_ptr() < end
    ]
    return sorted(found, key=lambda one: one.at)


def gaps(flat: torch.Tensor, pieces: Sequence[PlacedPiece]) -> Iterator[slice]:
    """Return the ranges of a flat tensor that none of these tensors occupies."""
    reached = 0
    for one in pieces:
        if one.at > reached:
            yield slice(reached, one.at)
        reached = one.at + one.numel
    if reached < flat.numel():
        yield slice(reached, flat.numel())
