"""Faults in AdamW itself and in its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..adapters.ddp.adapter import Ddp
from ..adapters.textbook.sharded_optimizer import ShardedOptimizer
from ..case.schema import Case
from ..contract import Built, Step, StepReport, grouped
from ..errors import Unsupported
from .parts import AdamWInParts, WithOptimizer

Options = dict[str, Any]


class _Coupled(AdamWInParts):
    def decay(self, p: torch.Tensor, gradient: torch.Tensor, group: Options) -> torch.Tensor:
        return gradient.add(p, alpha=group["weight_decay"])


class L2InsteadOfDecoupled(WithOptimizer):
    """Weight decay goes through the moments, as in Adam (TT #4382; DS PR#5104).

    Flagged: L2 instead of decoupled.
    """

    kind = _Coupled


class _Twice(AdamWInParts):
    def decay(self, p: torch.Tensor, gradient: torch.Tensor, group: Options) -> torch.Tensor:
        super().decay(p, gradient, group)
        return super().decay(p, gradient, group)


class DecayTwice(WithOptimizer):
    """Weight decay is applied twice. Flagged: weight decay twice."""

    kind = _Twice


class _ByStepSize(AdamWInParts):
    def update(self, p: torch.Tensor, state: dict[str, torch.Tensor], group: Options) -> None:
        size = group["weight_decay"] / (1 - self.betas(group)[0] ** (float(state["step"]) + 1))
        super().update(p, state, {**group, "weight_decay": size})


class DecayByStepSize(WithOptimizer):
    """The parameter decays by lr / (1 - beta1^t), the step size, in place of lr.

    Flagged: weight decay by the corrected step size.
    """

    kind = _ByStepSize


class _None(AdamWInParts):
    def decay(self, p: torch.Tensor, gradient: torch.Tensor, group: Options) -> torch.Tensor:
        return gradient


class DecayMissing(WithOptimizer):
    """There is no weight decay. Flagged: weight decay missing."""

    kind = _None


class _Excluded(AdamWInParts):
    def decay(self, p: torch.Tensor, gradient: torch.Tensor, group: Options) -> torch.Tensor:
        most = max(other["weight_decay"] for other in self.optimizer.param_groups)
        return super().decay(p, gradient, {**group, "weight_decay": group["weight_decay"] or most})


class DecayOnExcluded(WithOptimizer):
    """Parameters without weight decay decay like the others (groups too coarse, MG #4705).

    Flagged: weight decay on excluded parameters.
    """

    kind = _Excluded


class _After(AdamWInParts):
    def update(self, p: torch.Tensor, state: dict[str, torch.Tensor], group: Options) -> None:
        super().update(p, state, {**group, "weight_decay": 0.0})
        p.mul_(1 - group["lr"] * group["weight_decay"])


class DecayAfterUpdate(WithOptimizer):
    """Weight decay comes after the update. Flagged: weight decay after the update."""

    kind = _After


class _InRoot(AdamWInParts):
    def denominator(self, v: torch.Tensor, root: float, eps: float) -> torch.Tensor:
        return (v / root**2).add_(eps).sqrt_()


class EpsInRoot(WithOptimizer):
    """eps is added inside of the root. Flagged: eps inside the root."""

    kind = _InRoot


class _BeforeCorrection(AdamWInParts):
    def denominator(self, v: torch.Tensor, root: float, eps: float) -> torch.Tensor:
        return v.sqrt().add_(eps).div_(root)


class EpsBeforeCorrection(WithOptimizer):
    """eps is added before the bias correction. Flagged: eps before the bias correction."""

    kind = _BeforeCorrection


class _LateCount(AdamWInParts):
    def count(self, state: dict[str, torch.Tensor]) -> float:
        return float(state["step"]) + 1


class BiasCorrectionOffByOne(WithOptimizer):
    """The bias corrections are those of the next step. Flagged: step off by 1."""

    kind = _LateCount


class _PerMicrobatch(AdamWInParts):
    microbatches: int

    def count(self, state: dict[str, torch.Tensor]) -> float:
        return float(state["step"]) * self.microbatches


class MicrobatchesCountedAsSteps(WithOptimizer):
    """The bias corrections count microbatches. Flagged: microbatches counted as steps."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.optimizer.microbatches = case.training.microbatches

    kind = _PerMicrobatch
    optimizer: _PerMicrobatch


class _Swapped(AdamWInParts):
    def betas(self, group: Options) -> tuple[float, float]:
        beta1, beta2 = group["betas"]
        return beta2, beta1


class BetasSwapped(WithOptimizer):
    """beta1 and beta2 are exchanged. Flagged: betas swapped."""

    kind = _Swapped


class _FirstGroupsRate(ShardedOptimizer):
    def step(self, rates: Sequence[float]) -> None:
        super().step([rates[0]] * len(rates))


class GroupsCollapse(WithOptimizer):
    """All groups use the first one's rate (MG #4705). Flagged: options of another group."""

    kind = _FirstGroupsRate


class _NoSchedule(ShardedOptimizer):
    def step(self, rates: Sequence[float]) -> None:
        if not hasattr(self, "first"):
            self.first = list(rates)
        super().step(self.first)


class SchedulerLost(WithOptimizer):
    """The learning rate stays that of the first step (TT #275).

    Flagged: learning rate of another step.
    """

    kind = _NoSchedule


class _PerPiece(ShardedOptimizer):
    def step(self, rates: Sequence[float]) -> None:
        super().step(rates)
        for number, one in enumerate(self.owned):
            if one.parameter.grad is not None:
                self.optimizer.state[one.parameter]["step"] += number


class StepPerSubgroup(WithOptimizer):
    """The step count goes up once per piece, not once per step (DS PR#7982).

    Flagged: step count.
    """

    kind = _PerPiece


class OutsideTheOptimizer(Ddp):
    """The head is reduced, but it is not in the optimizer (MG #565). Flagged: never updated."""

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        built = super().build(model, case, mesh)
        named = [
            (name, p)
            for name, p in model.named_parameters()
            if p.requires_grad and not name.startswith("head.")
        ]
        if not named:
            raise Unsupported("only the head is trainable")
        return Built(built.model, torch.optim.AdamW(grouped(case, named)))

    def train_step(self, step: Step) -> StepReport:
        self.built.model.zero_grad()
        return super().train_step(step)


class FrozenDecay(Ddp):
    """Weight decay reaches frozen parameters. Flagged: untouched parameter changed."""

    def train_step(self, step: Step) -> StepReport:
        report = super().train_step(step)
        with torch.no_grad():
            for parameter in self.built.model.parameters():
                if not parameter.requires_grad:
                    parameter.mul_(1 - 1e-3)
        return report


class UnclippedUpdate(Ddp):
    """A copy of the gradient is clipped and exposed, and the optimizer gets the original.

    Flagged: gradient before clipping.
    """

    def clip(self, max_norm: float, norm_type: float) -> float:
        parameters = [p for p in self.built.model.parameters() if p.grad is not None]
        kept = [None if p.grad is None else p.grad.clone() for p in parameters]
        norm = super().clip(max_norm, norm_type)

        def before(*_: Any) -> None:
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient
            handle.remove()

        handle = self.built.optimizer.register_step_pre_hook(before)
        return norm


class _MomentsSwapped(ShardedOptimizer):
    def step(self, rates: Sequence[float]) -> None:
        super().step(rates)
        for state in self.optimizer.state.values():
            kept = state["exp_avg"].clone()
            state["exp_avg"].copy_(state["exp_avg_sq"])
            state["exp_avg_sq"].copy_(kept)


class MomentsSwapped(WithOptimizer):
    """exp_avg and exp_avg_sq are exchanged after a step. Flagged: moments swapped."""

    kind = _MomentsSwapped


class _MomentsReset(ShardedOptimizer):
    def step(self, rates: Sequence[float]) -> None:
        for state in self.optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
        super().step(rates)


class MomentsReset(WithOptimizer):
    """The moments of the step before are lost, the count of steps is not (DS PR#5263).

    Flagged: moments reset.
    """

    kind = _MomentsReset


class _StaleMoments(AdamWInParts):
    def update(self, p: torch.Tensor, state: dict[str, torch.Tensor], group: Options) -> None:
        m, v = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
        kept = p.clone()
        super().update(p, state, group)
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        if group["amsgrad"]:
            v = torch.maximum(v, state["max_exp_avg_sq"])
        p.copy_(kept).mul_(1 - group["lr"] * group["weight_decay"])
        root = (1 - beta2**step) ** 0.5
        denominator = self.denominator(v, root, group["eps"])
        p.addcdiv_(m, denominator, value=-group["lr"] / (1 - beta1**step))


class StaleMoments(WithOptimizer):
    """The parameter is updated with the old moments, which are updated afterwards.

    Flagged: moments of the previous step.
    """

    kind = _StaleMoments


class _Restarted(AdamWInParts):
    first: dict[torch.Tensor, float] | None = None

    def update(self, p: torch.Tensor, state: dict[str, torch.Tensor], group: Options) -> None:
        self.first = {} if self.first is None else self.first
        self.first.setdefault(state["exp_avg"], float(state["step"]))
        super().update(p, state, group)

    def count(self, state: dict[str, torch.Tensor]) -> float:
        assert self.first is not None
        return float(state["step"]) - self.first[state["exp_avg"]]


class StepsRestarted(WithOptimizer):
    """The bias corrections count only the steps since the start, even after a restore.

    DS PR#564. Flagged: steps counted from 0.
    """

    kind = _Restarted


class _MasterRounded(ShardedOptimizer):
    def step(self, rates: Sequence[float]) -> None:
        super().step(rates)
        for one in self.owned:
            if one.parameter.grad is not None:
                one.parameter.copy_(one.parameter.bfloat16())


class MasterRounded(WithOptimizer):
    """The parameters that the optimizer updates are in bf16, without an fp32 master copy.

    HF accelerate #2674. Flagged: rounded to bf16.
    """

    kind = _MasterRounded
