"""Faults in looking for an overflow, which show where one gradient alone overflows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.textbook.loss_scaling import LossScaler
from ..adapters.textbook.zero1 import Zero1
from ..case.schema import Case
from ..contract import Microbatch
from .fault import fault


class _Looks(Zero1):
    """ZeRO-1 whose scaler looks for an overflow in another way."""

    kind: ClassVar[type[LossScaler]] = LossScaler

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.scaler = self.kind(case, self.group, mesh.device_type)


class _InShard(LossScaler):
    def agreed(self, overflow: bool) -> bool:
        super().agreed(overflow)
        return overflow


@fault(
    "zero1", "update", bugs.RANKS_DISAGREE, source="PT PR#115710", features=("overflow-alone",)
)  # fmt: skip
class OverflowInOwnShardAlone(_Looks):
    """Ranks agree on an overflow, and each then goes by what it found in its own shard.

    FSDP1's scaler copied the flag before its reduction had ended.
    """

    kind = _InShard


class _InEvery(LossScaler):
    def agreed(self, overflow: bool) -> bool:
        found = torch.full((), float(overflow), device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.group)
        return bool(found)


@fault(
    "zero1", "update", bugs.STEP_NOT_SKIPPED, source="seen in review",
    features=("overflow-alone",), without=("world-1",),
)  # fmt: skip
class OverflowInEveryShard(_Looks):
    """A step is skipped only if every rank finds an overflow in its shard."""

    kind = _InEvery


class _InFirst(LossScaler):
    def unscale(self, gradients: Iterable[torch.Tensor]) -> None:
        buckets = list(gradients)  # none where this rank has no elements
        super().unscale(buckets[:1])
        for gradient in buckets[1:]:
            gradient.mul_(1.0 / self.scale)


@fault(
    "zero1", "update", bugs.STEP_NOT_SKIPPED, source="seen in review",
    features=("overflow-alone", "bucket-small"),
)  # fmt: skip
class OverflowInFirstBucket(_Looks):
    """An overflow is looked for in the first bucket alone."""

    kind = _InFirst


class _OfRankZero(LossScaler):
    before_reduction = False

    def agreed(self, overflow: bool) -> bool:
        found = torch.full((), float(self.before_reduction), device=self.device)
        dist.broadcast(found, group=self.group, group_src=0)
        return bool(found)


@fault(
    "zero1", "update", bugs.STEP_NOT_SKIPPED, source="WeatherGenerator #2724",
    features=("overflow-alone",),
)  # fmt: skip
class OverflowOfRankZero(_Looks):
    """Rank 0 decides for all, by its own gradient before it is reduced."""

    kind = _OfRankZero

    def _reduce(self) -> None:
        assert isinstance(self.scaler, _OfRankZero)
        self.scaler.before_reduction = not all(bool(g.isfinite().all()) for g in self.gradients)
        super()._reduce()


class _InLoss(LossScaler):
    finite = True

    def objective(self, loss: torch.Tensor, microbatch: Microbatch, count: int) -> torch.Tensor:
        self.finite &= bool(loss.isfinite())
        return super().objective(loss, microbatch, count)

    def agreed(self, overflow: bool) -> bool:
        return super().agreed(not self.finite)

    def update(self) -> None:
        super().update()
        self.finite = True


@fault(
    "zero1", "update", bugs.STEP_NOT_SKIPPED, source="OneTrainer PR#1154",
    features=("overflow-alone",),
)  # fmt: skip
class OverflowInLoss(_Looks):
    """An overflow is looked for in the losses, and not in the gradients."""

    kind = _InLoss


class _NanAlone(LossScaler):
    def unscale(self, gradients: Iterable[torch.Tensor]) -> None:
        if not self.enabled:
            return
        gradients = list(gradients)
        self.overflow = self.agreed(any(bool(one.isnan().any()) for one in gradients))
        for gradient in gradients:
            gradient.mul_(1.0 / self.scale)


@fault(
    "zero1", "update", bugs.STEP_NOT_SKIPPED, source="MMF PR#1073", features=("overflow-alone",)
)  # fmt: skip
class OverflowToNanAlone(_Looks):
    """A gradient is taken for finite unless it has NaN, so infinity passes."""

    kind = _NanAlone


@fault(
    "zero1", "update", bugs.RANKS_DISAGREE, source="PT PR#132816; MG #2263",
    features=("overflow-alone", "two-axes"), world=4,
)  # fmt: skip
class OverflowAgreedOverReplicas(_Looks):
    """Ranks agree on an overflow over the replicate axis, where all have the same shard."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        if case.axes.has("replicate"):
            self.scaler.group = mesh.get_group("replicate")
