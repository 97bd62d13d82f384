"""Faults in dynamic loss scaling, in looking for an overflow, and in skipping such steps."""

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
from .parts import Zero1InParts, with_loss


class NotesOwnOverflow(Zero1InParts):
    """ZeRO-1 that notes whether the rank's own gradient overflows, before it is reduced."""

    overflows = False

    def _reduce(self) -> None:
        self.overflows = not all(bool(g.isfinite().all()) for g in self.gradients)
        super()._reduce()


@fault(bugs.RANKS_DISAGREE, source="CA PR#1175", features=("overflow",))
class OverflowSeenLate(NotesOwnOverflow):
    """Each rank looks for an overflow in its own gradient, before it is reduced.

    Only the rank that has it skips the step.
    """

    def agreed(self, overflow: bool) -> bool:
        return self.overflows


@fault(bugs.STEP_NOT_SKIPPED, source="seen often", features=("overflow",))
class NeverSkips(Zero1InParts):
    """A step that overflows is taken."""

    def agreed(self, overflow: bool) -> bool:
        return False


@fault(bugs.STEP_NOT_SKIPPED, source="DS PR#7171", features=("overflow",))
class NanOnInfNorm(Zero1InParts):
    """An infinite norm is to become -1, which skips the step, but 0 times infinity is NaN."""

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        super().unscale(gradients)
        if not self.scaler.enabled:
            return
        square = torch.zeros((), device=self.scaler.device)
        for gradient in gradients:
            square += gradient.square().sum()
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        bad = norm.isinf().logical_or(norm.isnan())
        self.scaler.overflow = bool(bad * -1.0 + bad.logical_not() * norm == -1.0)


@fault(bugs.STEP_SKIPPED, source="seen often", features=("overflow", "several-steps"))
class OverflowNotCleared(Zero1InParts):
    """The overflow flag is not cleared, so every later step is skipped."""

    def agreed(self, overflow: bool) -> bool:
        return super().agreed(overflow or self.scaler.overflow)


@fault(
    bugs.SKIPPED_STEP_CHANGED_THE_STATE, source="DS PR#8435", features=("overflow", "several-steps")
)
class SkippedStepCounted(Zero1):
    """A skipped step counts in the bias correction."""

    def train_step(self, step: Step) -> StepReport:
        report = super().train_step(step)
        if report.skipped:
            for state in self.optimizer.optimizer.state.values():
                state["step"] += 1
        return report


@fault(bugs.UNSCALED_TWICE, source="seen often", features=("loss-scale",))
class UnscaledTwice(Zero1InParts):
    """The gradient is divided by the loss scale twice."""

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        gradients = list(gradients)
        super().unscale(gradients)
        self.divide(gradients)


@fault(bugs.UNSCALED_BY_ANOTHER_SCALE, source="DS PR#2695", features=("loss-scale",))
class UnscaledByNewScale(Zero1InParts):
    """The scale is updated before gradients are divided by it, which shows where it grows.

    DeepSpeed had this for the norm.
    """

    def plant(self) -> None:
        self.scaler.growth_interval = 1

    def divide(self, gradients: Iterable[Tensor]) -> None:
        super().update_scale()
        super().divide(gradients)

    def update_scale(self) -> None:
        pass


@fault(bugs.NORM_BEFORE_UNSCALING, source="Lightning #9599", features=("loss-scale", "clip-tight"))
class ClippedBeforeUnscaling(Zero1InParts):
    """Clipping sees the gradient that is still scaled."""

    def clip(self, max_norm: float, norm_type: float) -> float:
        gradients = [one.gradient for one in self.optimizer.owned]
        torch._foreach_mul_(gradients, self.scaler.scale)
        norm = super().clip(max_norm, norm_type)
        torch._foreach_div_(gradients, self.scaler.scale)
        return norm


@fault(bugs.RANKS_DISAGREE, source="PT PR#115710", features=("overflow-alone",))
class OverflowInOwnShardAlone(Zero1InParts):
    """Ranks agree on an overflow, and each then goes by what it found in its own shard.

    FSDP1's scaler copied the flag before its reduction had ended.
    """

    def agreed(self, overflow: bool) -> bool:
        super().agreed(overflow)
        return overflow


@fault(
    bugs.STEP_NOT_SKIPPED, source="seen in review", features=("overflow-alone",),
    without=("world-1",),
)  # fmt: skip
class OverflowInEveryShard(Zero1InParts):
    """A step is skipped only if every rank finds an overflow in its shard."""

    def agreed(self, overflow: bool) -> bool:
        found = torch.full((), float(overflow), device=self.scaler.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.group)
        return bool(found)


@fault(bugs.STEP_NOT_SKIPPED, source="seen in review", features=("overflow-alone", "bucket-small"))
class OverflowInFirstBucket(Zero1InParts):
    """An overflow is looked for in the first bucket alone."""

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        buckets = list(gradients)  # none where this rank has no elements
        super().unscale(buckets[:1])
        self.divide(buckets[1:])


@fault(bugs.STEP_NOT_SKIPPED, source="WeatherGenerator #2724", features=("overflow-alone",))
class OverflowOfRankZero(NotesOwnOverflow):
    """Rank 0 decides for all, by its own gradient before it is reduced."""

    def agreed(self, overflow: bool) -> bool:
        found = torch.full((), float(self.overflows), device=self.scaler.device)
        dist.broadcast(found, group=self.group, group_src=0)
        return bool(found)


@fault(bugs.STEP_NOT_SKIPPED, source="OneTrainer PR#1154", features=("overflow-alone",))
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


@fault(bugs.STEP_NOT_SKIPPED, source="MMF PR#1073", features=("overflow-alone",))
class OverflowToNanAlone(Zero1InParts):
    """A gradient is taken for finite unless it has NaN, so infinity passes."""

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        self.has_nan = any(bool(one.isnan().any()) for one in gradients)
        super().unscale(gradients)

    def agreed(self, overflow: bool) -> bool:
        return super().agreed(self.has_nan)


@fault(
    bugs.RANKS_DISAGREE, source="PT PR#132816; MG #2263", features=("overflow-alone", "two-axes"),
    world=4,
)  # fmt: skip
class OverflowAgreedOverReplicas(Zero1):
    """Ranks agree on an overflow over the replicate axis, where all have the same shard."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        if case.axes.has("replicate"):
            self.scaler.group = mesh.get_group("replicate")
