"""Bucket of replicated parameters, shared by ZeRO-1 and ZeRO-2."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...case.schema import Case
from ...case.shapes import unfrozen
from ...compat import all_gather_single, wait
from ...contract import Shard
from .flat import Named, ShardedBuffer, alike, needs_whole
from .partition import split
from .precision import cast_parameters, compute_dtype


class Bucket(ShardedBuffer):
    """Parameters that are whole on every rank: `local` is a view of `full`."""

    gradient: torch.Tensor

    def publish(self) -> dist.Work | None:
        """Launch the all-gather that gives every rank the updated shards of all ranks."""
        self.refresh()
        return all_gather_single(self.full, self.local, self.group)

    def shards(self) -> Iterator[Shard]:
        """Iterate over whole parameters, owned slices of the masters, and the whole padding."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            yield Shard(name, "parameter", parameter.detach(), tuple(parameter.shape))
        yield from super().shards()
        for gap in self.partition.padding(0, self.partition.numel):
            yield Shard(self.name, "padding", self.full[gap], (self.partition.numel,), gap)

    def restore(self, full: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Copy whole parameters, and the owned slices of them into the masters."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            parameter.detach().copy_(full[name, "parameter"])
        super().restore(full)


def buckets_of(model: nn.Module, case: Case, group: dist.ProcessGroup) -> list[Bucket]:
    """Make a bucket for each of `parts_of`, and cast the other parameters like those in them."""
    dtype = compute_dtype(case)
    parts = enumerate(parts_of(model, case))
    buckets = [
        Bucket(f"bucket{number}", part, group, dtype, whole=needs_whole(part, case))
        for number, part in parts
    ]
    cast_parameters(model, case)
    return buckets


def publish(buckets: Sequence[Bucket]) -> None:
    """Give every rank all updated parameters, with all buckets in flight at once."""
    for work in [bucket.publish() for bucket in buckets]:
        wait(work)


def parts_of(model: nn.Module, case: Case) -> list[Named]:
    """Split the parameters that ever train into parts of at most `sharding.bucket` elements.

    A part has one dtype, and is of parameters that the optimizer needs whole, or of others. Last
    parameters first, which is about the order in which the backward finishes gradients.
    """
    later = unfrozen(case)
    last_first = list(model.named_parameters())[::-1]
    trainable = [pair for pair in last_first if pair[1].requires_grad or pair[0] in later]
    parts: list[Named] = []
    for named in alike(trainable, case):
        sizes = [math.prod(parameter.shape) for _, parameter in named]
        indices = split(sizes, case.sharding.bucket)
        parts += [[named[index] for index in part] for part in indices]
    return parts
