"""Faults in AdamW and SGD themselves, in momentum, and in the inputs of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.textbook.zero1 import Zero1
from ..case.schema import Case
from ..case.shapes import sometimes_used
from ..contract import Built, Loader, Step, StepReport, grouped
from ..contract.implementation import Moment
from ..errors import Unsupported
from .fault import fault
from .parts import (
    AdamWInParts,
    CheckpointInParts,
    Options,
    Plantable,
    UpdatesInParts,
    Zero1InParts,
    average,
)

MOMENTUM: Mapping[str, Any] = {"optimizer": {"kind": "sgd", "momentum": 0.9, "nesterov": False}}
NESTEROV: Mapping[str, Any] = {"optimizer": {"kind": "sgd", "momentum": 0.9, "nesterov": True}}


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


@fault(bugs.OPTION_SCALED, source="seen often", features=("eps-1e-3",), world=3)
class EpsTimesRanks(AdamWInParts):
    """eps is multiplied by the number of ranks."""

    def denominator(self, v: Tensor, root: float, eps: float) -> Tensor:
        return super().denominator(v, root, eps * self.case.world_size)


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


class SGDInParts(UpdatesInParts):
    """ZeRO-1 with SGD split into parts that a fault can replace."""

    fixed: ClassVar[Mapping[str, Any]] = MOMENTUM

    def update(self, p: Tensor, group: Options) -> None:
        assert p.grad is not None
        d = self.decay(p, -p.grad if group["maximize"] else p.grad, group)
        self.move(p, self.direction(p, d, group), group)

    def move(self, p: Tensor, direction: Tensor, group: Options) -> None:
        """Move the piece along a direction."""
        p.add_(direction, alpha=-group["lr"])

    def decay(self, p: Tensor, gradient: Tensor, group: Options) -> Tensor:
        """Return the gradient with the decay in it."""
        return gradient.add(p, alpha=group["weight_decay"])

    def direction(self, p: Tensor, d: Tensor, group: Options) -> Tensor:
        """Update the buffer, which is made at the first step; return the direction of the step."""
        state = self.optimizer.optimizer.state[p]
        buffer = state.get("momentum_buffer")
        taken = self.taken_in(d, group)
        if buffer is None:
            buffer = state["momentum_buffer"] = taken.clone()
        else:
            buffer.mul_(group["momentum"]).add_(taken)
        return self.along(d, buffer, group)

    def taken_in(self, d: Tensor, group: Options) -> Tensor:
        """Return what enters the buffer."""
        return d

    def along(self, d: Tensor, buffer: Tensor, group: Options) -> Tensor:
        """Return the direction of the step, from the new buffer."""
        return d.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer


@fault(bugs.WEIGHT_DECAY_TWICE, source="seen often", features=("momentum",))
class SgdDecayTwice(SGDInParts):
    """Weight decay is added to the gradient, and the trainer shrinks the parameter as well."""

    def update(self, p: Tensor, group: Options) -> None:
        kept = p * (group["lr"] * group["weight_decay"])
        super().update(p, group)
        p.sub_(kept)


@fault(bugs.DECOUPLED_INSTEAD_OF_L2, source="seen often", features=("momentum",))
class DecayDecoupled(SgdDecayTwice):
    """Weight decay is that of AdamW: it does not enter the momentum."""

    def decay(self, p: Tensor, gradient: Tensor, group: Options) -> Tensor:
        return gradient


@fault(bugs.WEIGHT_DECAY_MISSING, source="seen often", features=("momentum",))
class SgdDecayMissing(SGDInParts):
    """SGD has no weight decay."""

    def decay(self, p: Tensor, gradient: Tensor, group: Options) -> Tensor:
        return gradient


@fault(bugs.NESTEROV_LEFT_OUT, source="none known", features=("nesterov",))
class NesterovDropped(SGDInParts):
    """The step is along the buffer, though the form is to be Nesterov's."""

    fixed = NESTEROV

    def along(self, d: Tensor, buffer: Tensor, group: Options) -> Tensor:
        return buffer


@fault(bugs.NESTEROV_ADDED, source="none known", features=("momentum",), without=("nesterov",))
class NesterovUnasked(SGDInParts):
    """The step has Nesterov's form, which nobody asked for."""

    def along(self, d: Tensor, buffer: Tensor, group: Options) -> Tensor:
        return super().along(d, buffer, {**group, "nesterov": True})


@fault(bugs.GRADIENT_DAMPENED, source="seen often", features=("momentum",))
class Dampening(SGDInParts):
    """The buffer is a moving average, as that of Adam."""

    def taken_in(self, d: Tensor, group: Options) -> Tensor:
        return d.mul(1 - group["momentum"])


@fault(bugs.LEARNING_RATE_IN_THE_MOMENTUM, source="seen often", features=("momentum",))
class RateInTheMomentum(SGDInParts):
    """The learning rate is in the buffer, as in the papers: a schedule acts on later steps."""

    def taken_in(self, d: Tensor, group: Options) -> Tensor:
        return d.mul(group["lr"])

    def move(self, p: Tensor, direction: Tensor, group: Options) -> None:
        p.sub_(direction)


@fault(bugs.MOMENTUM_LEFT_OUT, source="none known", features=("momentum",))
class MomentumIgnored(SGDInParts):
    """The buffer is kept, and the step is along the gradient."""

    def along(self, d: Tensor, buffer: Tensor, group: Options) -> Tensor:
        return d


@fault(bugs.MOMENTS_RESET, source="seen often", features=("momentum",))
class MomentumForgotten(SGDInParts):
    """The momentum buffer is lost in each step.

    The buffer is keyed by a tensor that each step replaces.
    """

    def step(self, rates: Sequence[float]) -> None:
        self.optimizer.optimizer.state.clear()
        super().step(rates)


@fault(
    bugs.GRADIENT_TIMES_W, obligation="update", source="seen often", world=3, features=("momentum",)
)
class SumForTheOptimizer(SGDInParts):
    """The mean is logged and clipped, and the optimizer is given the sum.

    AdamW would hide it in its square root.
    """

    def step(self, rates: Sequence[float]) -> None:
        for one in self.optimizer.owned:
            one.gradient.mul_(self.world_size)
        super().step(rates)


@fault(
    bugs.LOCAL_GRADIENT_ONLY, obligation="update", source="none known", world=3,
    features=("momentum",), without=("clip",),
)  # fmt: skip
class MomentumOfLocalGradients(Ddp):
    """Each rank keeps momentum of its own gradients, and parameters are averaged afterwards."""

    fixed = MOMENTUM
    capabilities = frozenset({"unfreeze"})

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None."""
        if sometimes_used(case.model):
            return "gradients are averaged parameter by parameter, over all ranks"
        if case.training.clip is not None:
            return "clipping would be of each rank's own gradients"
        return super().supports(case)

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        model: Any = self.built.model
        return cast(AbstractContextManager[Any], model.no_sync())

    def train_step(self, step: Step) -> StepReport:
        def reached(moment: Moment) -> None:
            self.local = [None if p.grad is None else p.grad.clone() for p in self.parameters()]
            for p in self.parameters():
                if p.grad is not None:
                    average(p.grad)
            step.reached(moment)
            for p, gradient in zip(self.parameters(), self.local, strict=True):
                p.grad = gradient

        report = super().train_step(replace(step, reached=reached))
        for p in self.parameters():
            average(p.data)
        return report

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that train."""
        return [p for p in self.built.model.parameters() if p.requires_grad]


@fault(bugs.MOMENTS_LOST, source="seen often", features=("momentum",))
class MomentumLost(CheckpointInParts, Zero1):
    """The optimizer is made again after the load."""

    fixed = MOMENTUM

    def end_load(self) -> None:
        self.optimizer.optimizer.state.clear()


@fault(bugs.TENSORS_EXCHANGED, source="none known", features=("momentum",))
class MomentumOfAnotherParameter(Zero1):
    """Buffers are loaded by number, and two parameters of one shape have changed places."""

    fixed = MOMENTUM
    others: Mapping[str, str] = {}

    def key(self, name: str, role: str) -> str:
        return super().key(self.others.get(name, name) if role == "momentum_buffer" else name, role)

    def load(self, directory: str, loader: Loader) -> None:
        first: dict[tuple[int, ...], str] = {}
        for name, parameter in self.model.named_parameters():
            other = first.setdefault(tuple(parameter.shape), name)
            if other != name and parameter.requires_grad:
                self.others = {name: other, other: name}
        super().load(directory, loader)
        self.others = {}
