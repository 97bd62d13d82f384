"""A bucket of replicated parameters: what ZeRO-1 and ZeRO-2 share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...compat import all_gather_single
from ...contract import Shard
from .partition import Partition, Piece, aligned, split

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

    def publish(self) -> dist.Work | None:
        """Launch the all-gather that gives every rank the updated shards of all ranks."""
        return all_gather_single(self.flat, self.shard, self.group)

    def padding(self) -> Iterator[Shard]:
        """The padding of the flat parameters, all of it, since they are replicated."""
        for gap in self.partition.padding(0, self.partition.numel):
            yield Shard(self.name, "padding", self.flat[gap], (self.partition.numel,), gap)


def buckets_of(model: nn.Module, limit: int, group: dist.ProcessGroup) -> list[Bucket]:
    """The trainable parameters of the model, in buckets of at most `limit` elements of one dtype.

    Last parameters first, which is about the order in which the backward finishes gradients.
    """
    trainable = [pair for pair in model.named_parameters() if pair[1].requires_grad]
    trainable.reverse()
    parts: list[Named] = []
    for named in of_one_dtype(trainable):
        indices = split([math.prod(parameter.shape) for _, parameter in named], limit)
        parts += [[named[index] for index in part] for part in indices]
    return [Bucket(f"bucket{number}", part, group) for number, part in enumerate(parts)]


def of_one_dtype(named: Named) -> list[Named]:
    """The parameters apart by dtype, in their order: a flat buffer has one."""
    dtypes = dict.fromkeys(parameter.dtype for _, parameter in named)
    return [[pair for pair in named if pair[1].dtype == dtype] for dtype in dtypes]
