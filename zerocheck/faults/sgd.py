"""Faults in SGD itself, in its momentum, and in its inputs. AdamW hides some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.textbook.zero1 import Zero1
from ..case.schema import Case
from ..case.shapes import sometimes_used
from ..contract import Loader, Step, StepReport
from ..contract.implementation import Moment
from .fault import fault
from .parts import CheckpointInParts, Options, UpdatesInParts, average

PLAIN: Mapping[str, Any] = {"optimizer": {"kind": "sgd", "momentum": 0.9, "nesterov": False}}
NESTEROV: Mapping[str, Any] = {"optimizer": {"kind": "sgd", "momentum": 0.9, "nesterov": True}}


class SGDInParts(UpdatesInParts):
    """ZeRO-1 with SGD split into parts that a fault can replace."""

    fixed: ClassVar[Mapping[str, Any]] = PLAIN

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

    fixed = PLAIN
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

    fixed = PLAIN

    def end_load(self) -> None:
        self.optimizer.optimizer.state.clear()


@fault(bugs.TENSORS_EXCHANGED, source="none known", features=("momentum",))
class MomentumOfAnotherParameter(Zero1):
    """Buffers are loaded by number, and two parameters of one shape have changed places."""

    fixed = PLAIN
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
