"""Faults in looking for an overflow, which show where one gradient alone overflows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.textbook.zero1 import Zero1
from ..case.schema import Case
from ..contract import Step, StepReport
from .fault import fault
from .loss_scaling import NotesOwnOverflow
from .parts import Zero1InParts, with_loss


@fault(
    "zero1", "update", bugs.RANKS_DISAGREE, source="PT PR#115710", features=("overflow-alone",)
)  # fmt: skip
class OverflowInOwnShardAlone(Zero1InParts):
    """Ranks agree on an overflow, and each then goes by what it found in its own shard.

    FSDP1's scaler copied the flag before its reduction had ended.
    """

    def agreed(self, overflow: bool) -> bool:
        super().agreed(overflow)
        return overflow


@fault(
    "zero1", "update", bugs.STEP_NOT_SKIPPED, source="seen in review",
    features=("overflow-alone",), without=("world-1",),
)  # fmt: skip
class OverflowInEveryShard(Zero1InParts):
    """A step is skipped only if every rank finds an overflow in its shard."""

    def agreed(self, overflow: bool) -> bool:
        found = torch.full((), float(overflow), device=self.scaler.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.group)
        return bool(found)


@fault(
    "zero1", "update", bugs.STEP_NOT_SKIPPED, source="seen in review",
    features=("overflow-alone", "bucket-small"),
)  # fmt: skip
class OverflowInFirstBucket(Zero1InParts):
    """An overflow is looked for in the first bucket alone."""

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        buckets = list(gradients)  # none where this rank has no elements
        super().unscale(buckets[:1])
        self.divide(buckets[1:])


@fault(
    "zero1", "update", bugs.STEP_NOT_SKIPPED, source="WeatherGenerator #2724",
    features=("overflow-alone",),
)  # fmt: skip
class OverflowOfRankZero(NotesOwnOverflow):
    """Rank 0 decides for all, by its own gradient before it is reduced."""

    def agreed(self, overflow: bool) -> bool:
        found = torch.full((), float(self.overflows), device=self.scaler.device)
        dist.broadcast(found, group=self.group, group_src=0)
        return bool(found)


@fault(
    "zero1", "update", bugs.STEP_NOT_SKIPPED, source="OneTrainer PR#1154",
    features=("overflow-alone",),
)  # fmt: skip
class OverflowInLoss(Zero1InParts):
    """An overflow is looked for in the losses, and not in the gradients."""

    def train_step(self, step: Step) -> StepReport:
        self.finite = True
        return super().train_step(with_loss(step, self.look))

    def look(self, loss: Tensor) -> Tensor:
        """Note whether a loss is finite."""
        self.finite &= bool(loss.isfinite())
        return loss

    def agreed(self, overflow: bool) -> bool:
        return super().agreed(not self.finite)


@fault(
    "zero1", "update", bugs.STEP_NOT_SKIPPED, source="MMF PR#1073", features=("overflow-alone",)
)  # fmt: skip
class OverflowToNanAlone(Zero1InParts):
    """A gradient is taken for finite unless it has NaN, so infinity passes."""

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        self.has_nan = any(bool(one.isnan().any()) for one in gradients)
        super().unscale(gradients)

    def agreed(self, overflow: bool) -> bool:
        return super().agreed(self.has_nan)


@fault(
    "zero1", "update", bugs.RANKS_DISAGREE, source="PT PR#132816; MG #2263",
    features=("overflow-alone", "two-axes"), world=4,
)  # fmt: skip
class OverflowAgreedOverReplicas(Zero1):
    """Ranks agree on an overflow over the replicate axis, where all have the same shard."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        if case.axes.has("replicate"):
            self.scaler.group = mesh.get_group("replicate")
