"""Bucket of replicated parameters, shared by ZeRO-1 and ZeRO-2."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...case.schema import Case
from ...case.shapes import unfrozen
from ...compat import all_gather_single
from ...contract import Shard
from ...contract.shard import Role
from .master import compute_dtype
from .partition import Partition, Piece, aligned, split
from .sharded_adamw import OwnedPiece

Named = Sequence[tuple[str, nn.Parameter]]


class Bucket:
    """Parameters of one dtype whose memory is one flat buffer, of which this rank updates a shard.

    flat    1-D, `partition.numel` elements: every parameter, on every rank, and padding
    own     the view of it that is this rank's, `partition.shard_size` elements
    shard   what this rank updates: `own`, or in mixed precision the fp32 masters of it
    """

    def __init__(
        self,
        name: str,
        parameters: Named,
        group: dist.ProcessGroup,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Build the bucket. dtype: of a flat buffer with separate masters; None: as is."""
        self.name = name
        self.group = group
        self.rank, self.world_size = group.rank(), group.size()
        self.parameters = [parameter for _, parameter in parameters]
        shapes = [(name, tuple(parameter.shape)) for name, parameter in parameters]
        first = self.parameters[0]
        kept = dtype or first.dtype
        self.partition = Partition(shapes, self.world_size, aligned(kept.itemsize))
        self.pieces: list[Piece] = self.partition.pieces(self.rank)
        self.flat = torch.zeros(self.partition.numel, device=first.device, dtype=kept)
        self.own = self.flat[self.partition.shard(self.rank)]
        self.shard = self.own
        if dtype is not None:
            self.shard = torch.zeros_like(self.own, dtype=first.dtype)
            self.restore({(name, "parameter"): p.detach() for name, p in parameters})
        for parameter, view in zip(self.parameters, self.views(self.flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of each parameter's elements in a flat buffer, in the parameter's shape."""
        return [
            flat[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, parameter in zip(self.partition.offsets, self.parameters, strict=True)
        ]

    def pieces_owned(self, gradient: torch.Tensor) -> list[OwnedPiece]:
        """Return the pieces that this rank updates; gradient: of the shard."""
        trains = {
            name: parameter.requires_grad
            for (name, _), parameter in zip(self.partition.shapes, self.parameters, strict=True)
        }
        return [
            OwnedPiece(piece, self.shard[piece.inside], gradient[piece.inside], trains[piece.name])
            for piece in self.pieces
        ]

    def trains(self) -> bool:
        """Return True if this rank already updates any of its pieces."""
        owned = {piece.name for piece in self.pieces}
        named = zip(self.partition.shapes, self.parameters, strict=True)
        return any(one.requires_grad for (name, _), one in named if name in owned)

    def unfreeze(self, names: Collection[str]) -> list[int]:
        """Unfreeze the bucket's parameters among the names, and return their indices."""
        numbers = [n for n, (name, _) in enumerate(self.partition.shapes) if name in names]
        for number in numbers:
            self.parameters[number].requires_grad_(True)
        return numbers

    def publish(self) -> dist.Work | None:
        """Launch the all-gather that gives every rank the updated shards of all ranks."""
        if self.shard is not self.own:
            self.own.copy_(self.shard)
        return all_gather_single(self.flat, self.own, self.group)

    def restore(self, full: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Take the owned slices of whole parameters into the masters, if there are any."""
        if self.shard is not self.own:
            take(full, self.pieces, self.shard)

    def masters(self) -> Iterator[Shard]:
        """Iterate over the owned slices of the masters."""
        if self.shard is not self.own:
            yield from slices(self.pieces, "master", self.shard)

    def padding(self) -> Iterator[Shard]:
        """Iterate over the whole padding of the flat buffer, which is replicated."""
        for gap in self.partition.padding(0, self.partition.numel):
            yield Shard(self.name, "padding", self.flat[gap], (self.partition.numel,), gap)


def take(
    full: Mapping[tuple[str, str], torch.Tensor], pieces: Sequence[Piece], shard: torch.Tensor
) -> None:
    """Copy the owned slices of whole parameters into a shard."""
    for piece in pieces:
        whole = full[piece.name, "parameter"].reshape(-1)
        shard[piece.inside] = whole[piece.start : piece.stop]


def slices(pieces: Sequence[Piece], role: Role, shard: torch.Tensor) -> Iterator[Shard]:
    """Iterate over the pieces of a shard, as slices of their parameters."""
    for piece in pieces:
        index = slice(piece.start, piece.stop)
        yield Shard(piece.name, role, shard[piece.inside], piece.shape, index)


def buckets_of(model: nn.Module, case: Case, group: dist.ProcessGroup) -> list[Bucket]:
    """Make a bucket for each of `parts_of`."""
    parts = parts_of(model, case)
    dtype = compute_dtype(case)
    return [Bucket(f"bucket{number}", part, group, dtype) for number, part in enumerate(parts)]


def parts_of(model: nn.Module, case: Case) -> list[Named]:
    """Split the parameters that ever train into parts of at most `sharding.bucket` elements.

    A part has one dtype.

    Last parameters first, which is about the order in which the backward finishes gradients.
    """
    later = unfrozen(case)
    trainable = [
        pair for pair in model.named_parameters() if pair[1].requires_grad or pair[0] in later
    ]
    trainable.reverse()
    parts: list[Named] = []
    for named in of_one_dtype(trainable):
        indices = split(
            [math.prod(parameter.shape) for _, parameter in named], case.sharding.bucket
        )
        parts += [[named[index] for index in part] for part in indices]
    return parts


def of_one_dtype(named: Named) -> list[Named]:
    """Group parameters by dtype, in their order: a flat buffer has one dtype."""
    dtypes = dict.fromkeys(parameter.dtype for _, parameter in named)
    return [[pair for pair in named if pair[1].dtype == dtype] for dtype in dtypes]
