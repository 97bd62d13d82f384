"""Faults in dynamic loss scaling and in skipping steps that overflow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..adapters.textbook.loss_scaling import LossScaler
from ..adapters.textbook.sharded_optimizer import ShardedOptimizer
from ..adapters.textbook.zero1 import Zero1
from ..case.schema import Case
from ..contract import Step, StepReport


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


class OverflowSeenLate(_WithScaler):
    """Each rank looks for an overflow in its own gradient, before it is reduced (CA PR#1175).

    Only the rank that has it skips the step. Flagged: ranks disagree.
    """

    kind = _LocalScaler

    def _reduce(self) -> None:
        assert isinstance(self.scaler, _LocalScaler)
        self.scaler.before_reduction = not all(
            bool(gradients.isfinite().all()) for gradients in self.gradients
        )
        super()._reduce()


class _UnscaledTwice(LossScaler):
    def unscale(self, gradients: Iterable[torch.Tensor]) -> None:
        gradients = list(gradients)
        super().unscale(gradients)
        for gradient in gradients:
            gradient.mul_(1.0 / self.scale)


class UnscaledTwice(_WithScaler):
    """The gradient is divided by the loss scale twice. Flagged: unscaled twice."""

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


class UnscaledByNewScale(_WithScaler):
    """The scale is updated before gradients are divided by it, which shows where it grows.

    DeepSpeed had this for the norm (DS PR#2695). Flagged: unscaled by another scale.
    """

    kind = _Updated


class _Never(LossScaler):
    def agreed(self, overflow: bool) -> bool:
        return False


class NeverSkips(_WithScaler):
    """A step that overflows is taken. Flagged: step not skipped."""

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


class NanOnInfNorm(_WithScaler):
    """An infinite norm is to become -1, which skips the step, but 0 times infinity is NaN.

    DS PR#7171. Flagged: step not skipped.
    """

    kind = _BySentinel


class _Sticky(LossScaler):
    def agreed(self, overflow: bool) -> bool:
        return super().agreed(overflow or self.overflow)


class OverflowNotCleared(_WithScaler):
    """The overflow flag is not cleared, so every later step is skipped. Flagged: step skipped."""

    kind = _Sticky


class SkippedStepCounted(_WithScaler):
    """A skipped step counts in the bias correction. Flagged: skipped step changed the state."""

    def train_step(self, step: Step) -> StepReport:
        report = super().train_step(step)
        if report.skipped:
            for state in self.optimizer.optimizer.state.values():
                state["step"] += 1
        return report


class _ClipsScaled(ShardedOptimizer):
    scaler: LossScaler

    def clip(self, max_norm: float, norm_type: float) -> float:
        gradients = [one.gradient for one in self.owned]
        torch._foreach_mul_(gradients, self.scaler.scale)
        norm = super().clip(max_norm, norm_type)
        torch._foreach_div_(gradients, self.scaler.scale)
        return norm


class ClippedBeforeUnscaling(Zero1):
    """Clipping sees the gradient that is still scaled (Lightning #9599).

    Flagged: norm before unscaling.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        own = self.optimizer
        self.optimizer = _ClipsScaled(case, own.owned, self.group, own.device)
        self.optimizer.scaler = self.scaler
