"""Faults in sharding optimizers of the user's own: steps of shards, states and counts that go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from .. import causes as bugs
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.fsdp2.gathered_muon import Fsdp2Muon, local
from ..case.schema import Case
from ..contract import Loader
from ..contract.groups import groups
from .fault import fault
from .parts import OneByOne, Zero1InParts


class SignedMomentum(torch.optim.Optimizer):
    """Lion: moves by the sign of a mean. Elementwise, and without a step count."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(torch.lerp(mean, p.grad, 0.1).sign_(), alpha=group["lr"])
                mean.lerp_(p.grad, 0.01)


class NormalizedMomentum(OneByOne):
    """Moves by a momentum over its norm: needs whole parameters. Counts in an int."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], rate: float) -> None:
        """Take one step of one parameter."""
        if not state:
            state["step"], state["momentum"] = 0, torch.zeros_like(p)
        state["step"] += 1
        state["momentum"].mul_(0.9).add_(g)
        self.move(p, state["momentum"], rate / state["step"] ** 0.5)

    def move(self, p: torch.Tensor, momentum: torch.Tensor, rate: float) -> None:
        """Move a parameter along its momentum."""
        p.sub_(momentum / (momentum.norm() + 1e-8), alpha=rate)


class CorrectedMean(SignedMomentum):
    """Moves by a mean that is corrected for its start. Counts in the parameter group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.1)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(mean / (1 - 0.9 ** group["step"]), alpha=group["lr"])


def _fixed(kind: type, *, elementwise: bool, count: str = "") -> Mapping[str, Any]:
    """Return the fields of a case with one of these classes, as inspection finds them."""
    state = {"name": "mean" if elementwise else "momentum", "size": 0.1 if elementwise else 5.0}
    user = {
        "location": f"{__name__}:{kind.__name__}",
        "states": [state],
        "count": count or ("none" if elementwise else "int"),
        "elementwise": elementwise,
        "weight_decay": elementwise,
    }
    return {"optimizer": {"kind": "user", "user": user}, "training": {"loss_scale": None}}


class _OfShards(NormalizedMomentum):
    def move(self, p: torch.Tensor, momentum: torch.Tensor, rate: float) -> None:
        super().move(local(p), local(momentum), rate)


@fault(bugs.STEP_OF_EACH_SHARD, source="Megatron-LM #5961; dion #18", features=("other-optimizer",))
class NormOfTheShard(Fsdp2):
    """An optimizer that needs whole parameters is given the local shards."""

    fixed: ClassVar[Mapping[str, Any]] = _fixed(NormalizedMomentum, elementwise=False)
    options: ClassVar[tuple[str, ...]] = Fsdp2Muon.options

    def make_optimizer(self, model: nn.Module, case: Case) -> Any:
        return _OfShards(groups(model, case))


@fault(bugs.STEP_COUNT_LOST, source="Megatron-LM #6920")
class CountOfTheUsersLost(Zero1InParts):
    """A step count that is an int is in no checkpoint, and starts at 0 after a load."""

    fixed = _fixed(NormalizedMomentum, elementwise=False)

    def restore_counts(self) -> None:
        super().restore_counts()
        for state in self.optimizer.optimizer.state.values():
            state["step"] = 0


@fault(bugs.STEP_COUNT_LOST, source="Megatron-LM #6920", features=("other-optimizer",))
class CountOfTheGroupLost(Fsdp2):
    """A step count in the parameter group is not restored, and starts at 0 after a load."""

    fixed: ClassVar[Mapping[str, Any]] = _fixed(CorrectedMean, elementwise=True, count="group")
    options: ClassVar[tuple[str, ...]] = Fsdp2Muon.options

    def make_optimizer(self, model: nn.Module, case: Case) -> Any:
        return CorrectedMean(groups(model, case))

    def load(self, directory: str, loader: Loader) -> None:
        super().load(directory, loader)
        for group in self.optimizers.groups():
            group["step"] = 0


@fault(bugs.WEIGHT_DECAY_MISSING, source="seen often")
class DecayOfTheUsersLost(Zero1InParts):
    """The options of the groups are lost when the user's optimizer is made of shards."""

    fixed = _fixed(SignedMomentum, elementwise=True)

    def step(self, rates: Sequence[float]) -> None:
        for group in self.optimizer.optimizer.param_groups:
            group["weight_decay"] = 0.0
        super().step(rates)


@fault(bugs.MOMENTS_LOST, source="lerobot #4658")
class MeanOfTheUsersLost(Zero1InParts):
    """The states of an optimizer that the checkpoint does not know are not loaded."""

    fixed = _fixed(SignedMomentum, elementwise=True)

    def restore_counts(self) -> None:
        super().restore_counts()
        for state in self.states():
            state["mean"].zero_()
