"""Faults in the ownership of elements, and in publishing what was updated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.textbook.bucket import Bucket, publish
from ..adapters.textbook.partition import Piece
from ..adapters.textbook.sharded_optimizer import OwnedPiece, ShardedOptimizer
from ..adapters.textbook.unit import FlatParameter
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..compat import all_gather_single
from ..contract import Built, Shard, Step, StepReport
from .fault import fault
from .parts import Plantable, StartsAnew, Zero3InParts


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
class LeftGathered(Fsdp2):
    """Ranks hold all parameters between steps, next to the shards that the optimizer has."""

    def shards(self) -> Iterator[Shard]:
        for shard in super().shards():
            held = self._sharded.get(shard.name)
            whole = None if held is None or shard.role != "parameter" else held.full_tensor()
            yield shard if whole is None else replace(shard, tensor=whole.detach(), index=None)


@fault(
    bugs.PARAMETERS_OF_THE_PREVIOUS_STEP, source="seen often",
    features=("several-steps",), without=("clip",),
)  # fmt: skip
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


@fault(bugs.UNTIED, source="verl #7834", features=("tied",))
class UntiedByItsWrapper(Fsdp2):
    """The model is made on the meta device, and the weights that were tied get memory each."""

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        head = model.get_submodule("head")
        whole = model.get_parameter("head.weight")
        copy = nn.Parameter(whole.detach().clone(), requires_grad=whole.requires_grad)
        if case.model.tied:
            head.weight = copy
        return super().build(model, case, mesh)


class GathersOthers(Zero3InParts):
    """ZeRO-3 that gathers, of some flat parameters, other shards than those that it holds."""

    def plant(self) -> None:
        self.sent: dict[FlatParameter, torch.Tensor] = {}

    def fill(self, flat: FlatParameter) -> dist.Work | None:
        return all_gather_single(flat.full, self.sent.get(flat, flat.local), flat.group)


@fault(bugs.PARAMETERS_OF_THE_PREVIOUS_STEP, source="MG #3140; DS PR#7707")
class GatherStale(GathersOthers):
    """The forward gathers the parameters of the step before."""

    before: dict[FlatParameter, torch.Tensor] | None = None

    def train_step(self, step: Step) -> StepReport:
        current = {flat: flat.local.clone() for flat in self.flats}
        self.sent, self.before = self.before or current, current
        return super().train_step(step)


@fault(
    bugs.MODULE_OF_AN_EARLIER_STEP, source="found on a GPU: FSDP2, cuDNN",
    features=("several-steps", "wrap-block"), without=("mixed-dtypes", "block-experts"),
)  # fmt: skip
class FirstParametersKept(GathersOthers):
    """The first unit is gathered anew, and its module computes with those of the first step."""

    first: torch.Tensor | None = None

    def train_step(self, step: Step) -> StepReport:
        learn = [flat for flat in self.flats if flat.reduces]
        flat = learn[0] if learn else self.flats[0]
        if self.first is None:
            self.first = flat.local.clone()
        elif len(learn) > 1 and len(self.first) == len(flat.local):
            self.sent[flat] = self.first
        return super().train_step(step)


@fault(bugs.COPIES_OF_THE_PREVIOUS_STEP, source="seen often")
class NotPublished(Zero1):
    """The last bucket is not gathered after the update."""

    def _publish(self) -> None:
        publish(self.buckets[:-1])


@fault(bugs.COPIES_OF_THE_PREVIOUS_STEP, source="MG #3140")
class PublishedBeforeUpdate(Zero2):
    """Parameters are gathered before the update."""

    def _end_microbatch(self) -> None:
        super()._end_microbatch()
        super()._publish()

    def _publish(self) -> None:
        pass


@fault(bugs.COPIES_ROUNDED_TO_BF16, source="PT #104770", without=("unfreeze", "overflow"))
class PublishedRounded(Zero1):
    """Parameters are sent in bf16 though they are fp32."""

    def _publish(self) -> None:
        for bucket in self.buckets:
            mine = bucket.shard.clone()
            bucket.shard.copy_(mine.bfloat16())
            publish([bucket])
            bucket.shard.copy_(mine)


@fault(bugs.INITIAL_STATE, source="PT #90465; HF #28244, #43847")
class MetaInitOverwritten(StartsAnew, Fsdp2):
    """Parameters are initialised again, on the shards."""

    def plant(self) -> None:
        with torch.no_grad():
            for parameter in self.built.model.parameters():
                parameter.add_(1e-3)  # another init would do; this one needs no random numbers


@fault(bugs.INITIAL_STATE, source="TT #4382; DS PR#5104")
class InitStep(StartsAnew, Zero1):
    """A real step is taken when the optimizer creates its state."""

    def plant(self) -> None:
        self.optimizer.step([group.lr for group in self.case.optimizer.groups])
        self._publish()
