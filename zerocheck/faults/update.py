"""Faults in AdamW itself and in its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..case.schema import Case
from ..contract import Built, Step, StepReport, grouped
from ..errors import Unsupported
from .fault import fault
from .parts import AdamWInParts, Options, Plantable, Zero1InParts


@fault(bugs.L2_INSTEAD_OF_DECOUPLED, source="TT #4382; DS PR#5104")
class L2InsteadOfDecoupled(AdamWInParts):
    """Weight decay goes through the moments, as in Adam."""

    def decay(self, p: Tensor, gradient: Tensor, group: Options) -> Tensor:
        return gradient.add(p, alpha=group["weight_decay"])


@fault(bugs.WEIGHT_DECAY_TWICE, source="seen often")
class DecayTwice(AdamWInParts):
    """Weight decay is applied twice."""

    def decay(self, p: Tensor, gradient: Tensor, group: Options) -> Tensor:
        return super().decay(p, super().decay(p, gradient, group), group)


@fault(bugs.WEIGHT_DECAY_BY_THE_CORRECTED_STEP_SIZE, source="seen often", features=("lr-large",))
class DecayByStepSize(AdamWInParts):
    """The parameter decays by lr / (1 - beta1^t), the step size, in place of lr."""

    def decay(self, p: Tensor, gradient: Tensor, group: Options) -> Tensor:
        size = group["weight_decay"] / (1 - self.betas(group)[0] ** float(self.state(p)["step"]))
        return super().decay(p, gradient, {**group, "weight_decay": size})


@fault(bugs.WEIGHT_DECAY_MISSING, source="seen often")
class DecayMissing(AdamWInParts):
    """There is no weight decay."""

    def decay(self, p: Tensor, gradient: Tensor, group: Options) -> Tensor:
        return gradient


@fault(bugs.WEIGHT_DECAY_ON_EXCLUDED_PARAMETERS, source="MG #4705", features=("some-decay",))
class DecayOnExcluded(AdamWInParts):
    """Parameters without weight decay decay like the others."""

    def decay(self, p: Tensor, gradient: Tensor, group: Options) -> Tensor:
        most = max(other["weight_decay"] for other in self.optimizer.optimizer.param_groups)
        return super().decay(p, gradient, {**group, "weight_decay": group["weight_decay"] or most})


@fault(bugs.WEIGHT_DECAY_AFTER_THE_UPDATE, source="seen often", features=("lr-large",))
class DecayAfterUpdate(AdamWInParts):
    """Weight decay comes after the update."""

    def update(self, p: Tensor, group: Options) -> None:
        super().update(p, {**group, "weight_decay": 0.0})
        p.mul_(1 - group["lr"] * group["weight_decay"])


@fault(bugs.EPS_INSIDE_THE_ROOT, source="seen often", features=("eps-1e-3",))
class EpsInRoot(AdamWInParts):
    """eps is added inside of the root."""

    def denominator(self, v: Tensor, root: float, eps: float) -> Tensor:
        return (v / root**2).add_(eps).sqrt_()


@fault(bugs.EPS_BEFORE_THE_BIAS_CORRECTION, source="seen often", features=("eps-1e-3",))
class EpsBeforeCorrection(AdamWInParts):
    """eps is added before the bias correction."""

    def denominator(self, v: Tensor, root: float, eps: float) -> Tensor:
        return v.sqrt().add_(eps).div_(root)


@fault(bugs.STEP_OFF_BY_1, source="TT #4382")
class BiasCorrectionOffByOne(AdamWInParts):
    """The bias corrections are those of the next step."""

    def count(self, state: dict[str, Tensor]) -> float:
        return float(state["step"]) + 1


@fault(bugs.MICROBATCHES_COUNTED_AS_STEPS, source="seen often", microbatches=3)
class MicrobatchesCountedAsSteps(AdamWInParts):
    """The bias corrections count microbatches."""

    def count(self, state: dict[str, Tensor]) -> float:
        return float(state["step"]) * self.case.training.microbatches


@fault(bugs.BETAS_SWAPPED, source="seen often")
class BetasSwapped(AdamWInParts):
    """beta1 and beta2 are exchanged."""

    def betas(self, group: Options) -> tuple[float, float]:
        beta1, beta2 = group["betas"]
        return beta2, beta1


@fault(bugs.MOMENTS_SWAPPED, source="seen often")
class MomentsSwapped(Zero1InParts):
    """exp_avg and exp_avg_sq are exchanged after a step."""

    def step(self, rates: Sequence[float]) -> None:
        super().step(rates)
        for state in self.states():
            kept = state["exp_avg"].clone()
            state["exp_avg"].copy_(state["exp_avg_sq"])
            state["exp_avg_sq"].copy_(kept)


@fault(bugs.MOMENTS_RESET, source="DS PR#5263", features=("several-steps",))
class MomentsReset(Zero1InParts):
    """The moments of the step before are lost, the count of steps is not."""

    def step(self, rates: Sequence[float]) -> None:
        for state in self.states():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
        super().step(rates)


@fault(bugs.MOMENTS_OF_THE_PREVIOUS_STEP, source="seen often")
class StaleMoments(AdamWInParts):
    """The parameter is updated with the old moments, which are updated afterwards."""

    def update(self, p: Tensor, group: Options) -> None:
        self.before = {role: one.clone() for role, one in self.state(p).items()}
        super().update(p, group)

    def move(self, p: Tensor, m: Tensor, v: Tensor, group: Options) -> None:
        old = self.before["exp_avg_sq"]
        v = torch.maximum(old, v) if group["amsgrad"] else old
        super().move(p, self.before["exp_avg"], v, group)


@fault(bugs.STEPS_COUNTED_FROM_0, source="DS PR#564, #5263", features=("mid-training",))
class StepsRestarted(AdamWInParts):
    """The bias corrections count only the steps since the start, even after a restore."""

    def plant(self) -> None:
        self.first: dict[Tensor, float] = {}

    def update(self, p: Tensor, group: Options) -> None:
        state = self.state(p)
        self.first.setdefault(state["exp_avg"], float(state["step"]))
        super().update(p, group)

    def count(self, state: dict[str, Tensor]) -> float:
        return float(state["step"]) - self.first[state["exp_avg"]]


@fault(bugs.ROUNDED_TO_BF16, source="HF accelerate #2674, #3979")
class MasterRounded(Zero1InParts):
    """The parameters that the optimizer updates are in bf16, without an fp32 master copy."""

    def step(self, rates: Sequence[float]) -> None:
        super().step(rates)
        for one in self.optimizer.owned:
            if one.parameter.grad is not None:
                one.parameter.copy_(one.parameter.bfloat16())


@fault(bugs.OPTIONS_OF_ANOTHER_GROUP, source="MG #4705", features=("groups",))
class GroupsCollapse(Zero1InParts):
    """All groups use the first one's rate."""

    def step(self, rates: Sequence[float]) -> None:
        super().step([rates[0]] * len(rates))


@fault(
    bugs.LEARNING_RATE_OF_ANOTHER_STEP, source="TT #275",
    features=("schedule-warmup", "several-steps"),
)  # fmt: skip
class SchedulerLost(Zero1InParts):
    """The learning rate stays that of the first step."""

    first: Sequence[float] = ()

    def step(self, rates: Sequence[float]) -> None:
        self.first = self.first or list(rates)
        super().step(self.first)


@fault(bugs.STEP_COUNT, source="DS PR#7982")
class StepPerSubgroup(Zero1InParts):
    """The step count goes up once per piece, not once per step."""

    def step(self, rates: Sequence[float]) -> None:
        super().step(rates)
        for number, one in enumerate(self.optimizer.owned):
            if one.parameter.grad is not None:
                self.optimizer.optimizer.state[one.parameter]["step"] += number


@fault(bugs.NEVER_UPDATED, source="MG #565")
class OutsideTheOptimizer(Ddp):
    """The head is reduced, but it is not in the optimizer."""

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


@fault(bugs.UNTOUCHED_PARAMETER_CHANGED, source="seen often", features=("frozen",))
class FrozenDecay(Plantable, Ddp):
    """Weight decay reaches frozen parameters."""

    def end_step(self) -> None:
        with torch.no_grad():
            for parameter in self.built.model.parameters():
                if not parameter.requires_grad:
                    parameter.mul_(1 - 1e-3)


@fault(bugs.GRADIENT_BEFORE_CLIPPING, source="DS PR#5170", features=("clip-tight",))
class UnclippedUpdate(Ddp):
    """A copy of the gradient is clipped and exposed, and the optimizer gets the original."""

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
