"""Partition of a flat group of parameters on one rank, as shards, without communication.

So DeepSpeed keeps the fp32 masters that its optimizers update, from ZeRO stage 1 on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .shard import Role, Shard

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


def of_whole_groups(
    flats: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    named: Mapping[str, torch.Tensor],
    ranks: Sequence[int],
) -> Iterator[GroupPartition]:
    """Yield the partition of each group whose parameters are whole on every rank (stages 1, 2).

    flats, masters: of each group; named: the parameters; ranks: this one's, in the ranks of each
    group, which have partitions of equal size in their order.
    """
    for flat, master, rank in zip(flats, masters, ranks, strict=True):
        low = rank * master.numel()
        high = low + master.numel()
        yield GroupPartition(
            master,
            [
                PartitionPiece(
                    one.name,
                    tuple(named[one.name].shape),
                    max(low, one.at) - one.at,
                    min(high, one.at + one.numel) - one.at,
                    max(low, one.at) - low,
                )
                for one in lying_in(flat, named)
                if max(low, one.at) < min(high, one.at + one.numel)
            ],
        )


def of_parts(
    flats: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    named: Mapping[str, Any],
    range_of: Callable[[Any], tuple[int, int]],
) -> Iterator[GroupPartition]:
    """Yield the partition of each group of parameters that are sharded, too (stage 3): their parts.

    named: parameters with `ds_tensor`, the part, and `ds_shape`; range_of: elements of the whole
    that the part of a parameter has.
    """
    parts = {name: parameter.ds_tensor for name, parameter in named.items()}
    for flat, master in zip(flats, masters, strict=True):
        found = []
        for one in lying_in(flat, parts):
            start, stop = range_of(named[one.name])
            if start < stop:
                shape = tuple(named[one.name].ds_shape)
                found.append(PartitionPiece(one.name, shape, start, stop, one.at))
        yield GroupPartition(master, found)


def range_of_part(parameter: Any, rank: int) -> tuple[int, int]:
    """Return the elements of a parameter of stage 3 that a rank holds; parts are equally long."""
    size, numel = parameter.ds_tensor.numel(), parameter.ds_numel
    return min(rank * size, numel), min((rank + 1) * size, numel)


def is_gathered(parameter: Any) -> bool:
    """Return True if all of a parameter of stage 3 is here, as between steps if it persists."""
    return bool(parameter.ds_persist) and parameter.shape == parameter.ds_shape
