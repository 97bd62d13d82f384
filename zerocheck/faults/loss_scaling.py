"""Faults in dynamic loss scaling and in skipping steps that overflow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.textbook.loss_scaling import LossScaler
from ..adapters.textbook.sharded_optimizer import ShardedOptimizer
from ..adapters.textbook.zero1 import Zero1
from ..case.schema import Case
from ..contract import Step, StepReport
from .fault import fault


class _WithScaler(Zero1):
    """ZeRO-1 with its scaler replaced by `kind`."""

    kind: ClassVar[type[LossScaler]] = LossScaler

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.scaler = self.kind(case, self.group, mesh.device_type)


class _LocalScaler(LossScaler):
    before_reduction = False

    def agreed(self, overflow: bool) -> bool:
        return self.before_reduction


@fault("zero1", "update", bugs.RANKS_DISAGREE, source="CA PR#1175", features=("overflow",))
class OverflowSeenLate(_WithScaler):
    """Each rank looks for an overflow in its own gradient, before it is reduced.

    Only the rank that has it skips the step.
    """

    kind = _LocalScaler

    def _reduce(self) -> None:
        assert isinstance(self.scaler, _LocalScaler)
        self.scaler.before_reduction = not all(
            bool(gradients.isfinite().all()) for gradients in self.gradients
        )
        super()._reduce()


class _Never(LossScaler):
    def agreed(self, overflow: bool) -> bool:
        return False


@fault("zero1", "update", bugs.STEP_NOT_SKIPPED, source="seen often", features=("overflow",))
class NeverSkips(_WithScaler):
    """A step that overflows is taken."""

    kind = _Never


class _BySentinel(LossScaler):
    def unscale(self, gradients: Iterable[torch.Tensor]) -> None:
        super().unscale(gradients)
        if not self.enabled:
            return
        square = torch.zeros((), device=self.device)
        for gradient in gradients:
            square += gradient.square().sum()
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        bad = norm.isinf().logical_or(norm.isnan())
        self.overflow = bool(bad * -1.0 + bad.logical_not() * norm == -1.0)


@fault("zero1", "update", bugs.STEP_NOT_SKIPPED, source="DS PR#7171", features=("overflow",))
class NanOnInfNorm(_WithScaler):
    """An infinite norm is to become -1, which skips the step, but 0 times infinity is NaN."""

    kind = _BySentinel


class _Sticky(LossScaler):
    def agreed(self, overflow: bool) -> bool:
        return super().agreed(overflow or self.overflow)


@fault(
    "zero1", "update", bugs.STEP_SKIPPED, source="seen often",
    features=("overflow", "several-steps"),
)  # fmt: skip
class OverflowNotCleared(_WithScaler):
    """The overflow flag is not cleared, so every later step is skipped."""

    kind = _Sticky


@fault(
    "zero1", "update", bugs.SKIPPED_STEP_CHANGED_THE_STATE, source="DS PR#8435",
    features=("overflow", "several-steps"),
)  # fmt: skip
class SkippedStepCounted(_WithScaler):
    """A skipped step counts in the bias correction."""

    def train_step(self, step: Step) -> StepReport:
        report = super().train_step(step)
        if report.skipped:
            for state in self.optimizer.optimizer.state.values():
                state["step"] += 1
        return report


class _UnscaledTwice(LossScaler):
    def unscale(self, gradients: Iterable[torch.Tensor]) -> None:
        gradients = list(gradients)
        super().unscale(gradients)
        for gradient in gradients:
            gradient.mul_(1.0 / self.scale)


@fault("zero1", "gradient", bugs.UNSCALED_TWICE, source="seen often", features=("loss-scale",))
class UnscaledTwice(_WithScaler):
    """The gradient is divided by the loss scale twice."""

    kind = _UnscaledTwice


class _Updated(LossScaler):
    growth_interval = 1

    def unscale(self, gradients: Iterable[torch.Tensor]) -> None:
        gradients = list(gradients)
        if self.enabled:
            self.overflow = self.agreed(not all(bool(g.isfinite().all()) for g in gradients))
            super().update()
        for gradient in gradients:
            gradient.mul_(1.0 / self.scale)

    def update(self) -> None:
        pass


@fault(
    "zero1", "gradient", bugs.UNSCALED_BY_ANOTHER_SCALE, source="DS PR#2695",
    features=("loss-scale",),
)  # fmt: skip
class UnscaledByNewScale(_WithScaler):
    """The scale is updated before gradients are divided by it, which shows where it grows.

    DeepSpeed had this for the norm.
    """

    kind = _Updated


class _ClipsScaled(ShardedOptimizer):
    scaler: LossScaler

    def clip(self, max_norm: float, norm_type: float) -> float:
        gradients = [one.gradient for one in self.owned]
        torch._foreach_mul_(gradients, self.scaler.scale)
        norm = super().clip(max_norm, norm_type)
        torch._foreach_div_(gradients, self.scaler.scale)
        return norm


@fault(
    "zero1", "clip", bugs.NORM_BEFORE_UNSCALING, source="Lightning #9599",
    features=("loss-scale", "clip-tight"),
)  # fmt: skip
class ClippedBeforeUnscaling(Zero1):
    """Clipping sees the gradient that is still scaled."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        optimizer = self.optimizer
        self.optimizer = _ClipsScaled(case, optimizer.owned, self.group, optimizer.device)
        self.optimizer.scaler = self.scaler
