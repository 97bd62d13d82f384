"""Faults in the ownership of elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.textbook.bucket import Bucket
from ..adapters.textbook.partition import Piece
from ..adapters.textbook.sharded_optimizer import OwnedPiece, ShardedOptimizer
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..contract import Shard
from .fault import fault
from .parts import Plantable


def _own(subject: Zero1, pieces: Callable[[Bucket], list[Piece]]) -> None:
    """Rebuild the optimizer over other pieces of the flat buffers."""
    owned = []
    for bucket, gradients in zip(subject.buckets, subject.gradients, strict=True):
        start = dict(zip(bucket.names, bucket.partition.offsets, strict=True))
        for piece in pieces(bucket):
            inside = slice(start[piece.name] + piece.start, start[piece.name] + piece.stop)
            owned.append(OwnedPiece(piece, bucket.full[inside], gradients[inside]))
    optimizer = subject.optimizer
    subject.optimizer = ShardedOptimizer(subject.case, owned, subject.group, optimizer.device)


@fault(bugs.SAME_SHARD_ON_EVERY_RANK, source="DS PR#2059")
class GroupPartitionId(Plantable, Zero1):
    """The partition id of one rank serves for all, so that all own the same."""

    def plant(self) -> None:
        _own(self, lambda bucket: bucket.partition.pieces(0))


@fault(bugs.SHARDS_OVERLAP, source="FS #907")
class ShardsOverlap(Plantable, Zero1):
    """Each shard is one element too long: padded for another group."""

    def plant(self) -> None:
        _own(self, lambda bucket: [_longer(piece) for piece in bucket.pieces])


def _longer(piece: Piece) -> Piece:
    return replace(piece, stop=min(piece.stop + 1, math.prod(piece.shape)))


@fault(bugs.REMAINDER_DROPPED, source="DS #1380", features=("uneven",))
class RemainderDropped(Plantable, Zero1):
    """The remainder of a division by W is stripped as if it were padding."""

    def plant(self) -> None:
        _own(self, lambda bucket: [p for p in map(self._cut, bucket.pieces) if p.start < p.stop])

    def _cut(self, piece: Piece) -> Piece:
        numel = math.prod(piece.shape)
        return replace(piece, stop=min(piece.stop, numel - numel % self.world_size))


@fault(bugs.PADDED_SHAPE, source="DS PR#848, #851", features=("uneven",), without=("parameter-0d",))
class PaddedShape(Zero3):
    """Padded shapes are reported as the global ones."""

    def shards(self) -> Iterator[Shard]:
        for shard in super().shards():
            rows = shard.shape[0] if shard.shape else 0
            world = self.case.world_size
            padded = (-(-rows // world) * world, *shard.shape[1:])
            yield replace(shard, shape=padded) if shard.role == "parameter" else shard


@fault(bugs.RANK_LEFT_OUT, source="DS PR#7585")
class RankShardsLost(Fsdp2):
    """The last rank's shards are left out of the state."""

    def shards(self) -> Iterator[Shard]:
        for shard in super().shards():
            last = shard.index is not None and _stop(shard) == shard.shape[0] > 0
            if not last:
                yield shard


@fault(bugs.NOT_SHARDED, source="accelerate on CPU")
class NothingSharded(Ddp):
    """The class declares FSDP, and is DDP, like accelerate's FSDP plugins on the CPU."""

    stage = 3


@fault(bugs.LEFT_GATHERED, source="seen often")
class NeverResharded(Plantable, Fsdp2):
    """Resharding after the backward is off, as between microbatches, and never on again."""

    def plant(self) -> None:
        wrapped: Any = self.built.model
        wrapped.set_reshard_after_backward(False)


def _stop(shard: Shard) -> int:
    assert isinstance(shard.index, tuple)
    return 0 if shard.index[0].start == 0 else shard.index[0].stop


@fault(bugs.UNTIED, source="MG #656; HF accelerate PR#3154", features=("tied",))
class Untied(Zero1):
    """The alias of a tied parameter becomes a parameter of its own."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        if case.model.tied:
            head = model.get_submodule("head")
            head.weight = nn.Parameter(
                model.get_parameter("head.weight").detach().clone(),
                requires_grad=model.get_parameter("head.weight").requires_grad,
            )
        super().__init__(model, case, mesh)
