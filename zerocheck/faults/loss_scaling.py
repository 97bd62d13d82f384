"""Faults in dynamic loss scaling and in skipping steps that overflow."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from .. import causes as bugs
from ..adapters.textbook.zero1 import Zero1
from ..contract import Step, StepReport
from .fault import fault
from .parts import Zero1InParts


class NotesOwnOverflow(Zero1InParts):
    """ZeRO-1 that notes whether the rank's own gradient overflows, before it is reduced."""

    overflows = False

    def _reduce(self) -> None:
        self.overflows = not all(bool(g.isfinite().all()) for g in self.gradients)
        super()._reduce()


@fault("zero1", "update", bugs.RANKS_DISAGREE, source="CA PR#1175", features=("overflow",))
class OverflowSeenLate(NotesOwnOverflow):
    """Each rank looks for an overflow in its own gradient, before it is reduced.

    Only the rank that has it skips the step.
    """

    def agreed(self, overflow: bool) -> bool:
        return self.overflows


@fault("zero1", "update", bugs.STEP_NOT_SKIPPED, source="seen often", features=("overflow",))
class NeverSkips(Zero1InParts):
    """A step that overflows is taken."""

    def agreed(self, overflow: bool) -> bool:
        return False


@fault("zero1", "update", bugs.STEP_NOT_SKIPPED, source="DS PR#7171", features=("overflow",))
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


@fault(
    "zero1", "update", bugs.STEP_SKIPPED, source="seen often",
    features=("overflow", "several-steps"),
)  # fmt: skip
class OverflowNotCleared(Zero1InParts):
    """The overflow flag is not cleared, so every later step is skipped."""

    def agreed(self, overflow: bool) -> bool:
        return super().agreed(overflow or self.scaler.overflow)


@fault(
    "zero1", "update", bugs.SKIPPED_STEP_CHANGED_THE_STATE, source="DS PR#8435",
    features=("overflow", "several-steps"),
)  # fmt: skip
class SkippedStepCounted(Zero1):
    """A skipped step counts in the bias correction."""

    def train_step(self, step: Step) -> StepReport:
        report = super().train_step(step)
        if report.skipped:
            for state in self.optimizer.optimizer.state.values():
                state["step"] += 1
        return report


@fault("zero1", "gradient", bugs.UNSCALED_TWICE, source="seen often", features=("loss-scale",))
class UnscaledTwice(Zero1InParts):
    """The gradient is divided by the loss scale twice."""

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        gradients = list(gradients)
        super().unscale(gradients)
        self.divide(gradients)


@fault(
    "zero1", "gradient", bugs.UNSCALED_BY_ANOTHER_SCALE, source="DS PR#2695",
    features=("loss-scale",),
)  # fmt: skip
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


@fault(
    "zero1", "clip", bugs.NORM_BEFORE_UNSCALING, source="Lightning #9599",
    features=("loss-scale", "clip-tight"),
)  # fmt: skip
class ClippedBeforeUnscaling(Zero1InParts):
    """Clipping sees the gradient that is still scaled."""

    def clip(self, max_norm: float, norm_type: float) -> float:
        gradients = [one.gradient for one in self.optimizer.owned]
        torch._foreach_mul_(gradients, self.scaler.scale)
        norm = super().clip(max_norm, norm_type)
        torch._foreach_div_(gradients, self.scaler.scale)
        return norm
