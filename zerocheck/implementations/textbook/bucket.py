"""A bucket of replicated parameters: what ZeRO-1 and ZeRO-2 share."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...case.schema import Case
from ...case.shapes import unfrozen
from ...compat import all_gather_single
from ...contract import Shard
from .partition import Partition, Piece, aligned, split
from .sharded_adamw import Owned

Named = Sequence[tuple[str, nn.Parameter]]


class Bucket:
    """Parameters of one dtype whose memory is one flat buffer, of which this rank updates a shard.

    flat    1-D, `partition.numel` elements: every parameter, on every rank, and padding
    shard   the view of it that this rank updates, `partition.shard_size` elements
    """

    def __init__(self, name: str, parameters: Named, group: dist.ProcessGroup) -> None:
        self.name = name
        self.group = group
        self.rank, self.world_size = group.rank(), group.size()
        self.parameters = [parameter for _, parameter in parameters]
        shapes = [(name, tuple(parameter.shape)) for name, parameter in parameters]
        first = self.parameters[0]
        self.partition = Partition(shapes, self.world_size, aligned(first.element_size()))
        self.pieces: list[Piece] = self.partition.pieces(self.rank)
        self.flat = torch.zeros(self.partition.numel, device=first.device, dtype=first.dtype)
        self.shard = self.flat[self.partition.shard(self.rank)]
        for parameter, view in zip(self.parameters, self.views(self.flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A view of each parameter's elements in a flat buffer, in the parameter's shape."""
        return [
            flat[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, parameter in zip(self.partition.offsets, self.parameters, strict=True)
        ]

    def pieces_owned(self, gradient: torch.Tensor) -> list[Owned]:
        """The pieces that this rank updates; gradient: of the shard."""
        trains = {
            name: parameter.requires_grad
            for (name, _), parameter in zip(self.partition.shapes, self.parameters, strict=True)
        }
        return [
            Owned(piece, self.shard[piece.inside], gradient[piece.inside], trains[piece.name])
            for piece in self.pieces
        ]

    def unfreeze(self, names: Collection[str]) -> list[int]:
        """Let those of the parameters train that are among the names; returns their numbers."""
        numbers = [n for n, (name, _) in enumerate(self.partition.shapes) if name in names]
        for number in numbers:
            self.parameters[number].requires_grad_(True)
        return numbers

    def publish(self) -> dist.Work | None:
        """Launch the all-gather that gives every rank the updated shards of all ranks."""
        return all_gather_single(self.flat, self.shard, self.group)

    def padding(self) -> Iterator[Shard]:
        """The padding of the flat parameters, all of it, since they are replicated."""
        for gap in self.partition.padding(0, self.partition.numel):
            yield Shard(self.name, "padding", self.flat[gap], (self.partition.numel,), gap)


def buckets_of(model: nn.Module, case: Case, group: dist.ProcessGroup) -> list[Bucket]:
    """A bucket for each of `parts_of`."""
    parts = parts_of(model, case)
    return [Bucket(f"bucket{number}", part, group) for number, part in enumerate(parts)]


def parts_of(model: nn.Module, case: Case) -> list[Named]:
    """The parameters that train, now or later, in parts of `sharding.bucket` elements at most.

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
    """The parameters apart by dtype, in their order: a flat buffer has one."""
    dtypes = dict.fromkeys(parameter.dtype for _, parameter in named)
    return [[pair for pair in named if pair[1].dtype == dtype] for dtype in dtypes]
