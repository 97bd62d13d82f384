"""Faults in the ownership of elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..adapters.ddp.adapter import Ddp
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.textbook.bucket import Bucket
from ..adapters.textbook.partition import Piece
from ..adapters.textbook.sharded_optimizer import OwnedPiece, ShardedOptimizer
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..contract import Shard


def _own(subject: Zero1, pieces: Callable[[Bucket], list[Piece]]) -> None:
    """Rebuild the optimizer over other pieces of the flat buffers."""
    owned = []
    for bucket, gradients in zip(subject.buckets, subject.gradients, strict=True):
        start = dict(
            zip((n for n, _ in bucket.partition.shapes), bucket.partition.offsets, strict=True)
        )
        for piece in pieces(bucket):
            inside = slice(start[piece.name] + piece.start, start[piece.name] + piece.stop)
            owned.append(OwnedPiece(piece, bucket.full[inside], gradients[inside]))
    own = subject.optimizer
    subject.optimizer = ShardedOptimizer(subject.case, owned, subject.group, own.device)


class GroupPartitionId(Zero1):
    """The partition id of one rank serves for all, so that all own the same (DS PR#2059).

    Flagged: ownership, elements that no rank holds.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        _own(self, lambda bucket: bucket.partition.pieces(0))


class ShardsOverlap(Zero1):
    """Each shard is one element too long: padded for another group (FS #907).

    Flagged: ownership, elements that two ranks hold.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        _own(self, lambda bucket: [_longer(piece) for piece in bucket.pieces])


def _longer(piece: Piece) -> Piece:
    numel = 1
    for size in piece.shape:
        numel *= size
    return replace(piece, stop=min(piece.stop + 1, numel))


class RemainderDropped(Zero1):
    """The remainder of a division by W is stripped as if it were padding (DS #1380).

    Flagged: ownership, elements that no rank holds.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        _own(self, lambda bucket: [p for p in map(self._cut, bucket.pieces) if p.start < p.stop])

    def _cut(self, piece: Piece) -> Piece:
        numel = 1
        for size in piece.shape:
            numel *= size
        return replace(piece, stop=min(piece.stop, numel // self.world_size * self.world_size))


class PaddedShape(Zero3):
    """Padded shapes are reported as the global ones (padding-misaligns, DS PR#848).

    Flagged: ownership, another global shape.
    """

    def shards(self) -> Iterator[Shard]:
        for shard in super().shards():
            rows = shard.shape[0] if shard.shape else 0
            world = self.case.world_size
            padded = (-(-rows // world) * world, *shard.shape[1:])
            yield replace(shard, shape=padded) if shard.role == "parameter" else shard


class RankShardsLost(Fsdp2):
    """The last rank's shards are left out of the state (first-group-saved, DS PR#7585).

    Flagged: ownership, elements that no rank holds.
    """

    def shards(self) -> Iterator[Shard]:
        for shard in super().shards():
            last = shard.index is not None and _stop(shard) == shard.shape[0] > 0
            if not last:
                yield shard


def _stop(shard: Shard) -> int:
    assert isinstance(shard.index, tuple)
    return 0 if shard.index[0].start == 0 else shard.index[0].stop


class Untied(Zero1):
    """The alias of a tied parameter becomes a parameter of its own (MG #656; accelerate PR#3154).

    Flagged: ownership, a parameter that the model does not have.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        if case.model.tied:
            head = model.get_submodule("head")
            head.weight = nn.Parameter(
                model.get_parameter("head.weight").detach().clone(),
                requires_grad=model.get_parameter("head.weight").requires_grad,
            )
        super().__init__(model, case, mesh)


class NothingSharded(Ddp):
    """The class declares FSDP, and is DDP, like accelerate's FSDP plugins on the CPU.

    Flagged: not sharded.
    """

    stage = 3
