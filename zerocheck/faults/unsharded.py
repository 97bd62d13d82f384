"""Faults in optimizers of torch that are their own reference: states and options that are lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import causes as bugs
from ..adapters.textbook.zero1 import Zero1
from .fault import fault
from .parts import Zero1InParts
from .update import GroupsCollapse


def _fixed(kind: str, **options: Any) -> Mapping[str, Any]:
    return {"optimizer": {"kind": kind, **options}, "training": {"loss_scale": None}}


@fault(bugs.SCALAR_STATE_LOST, source="none known", features=("mid-training",))
class ProductOfMomentaLost(Zero1):
    """NAdam's product of momenta is no tensor of the shape of a parameter, and is not restored."""

    fixed = _fixed("nadam")

    def restore(self, full: Mapping[tuple[str, str], torch.Tensor]) -> None:
        super().restore(full)
        for state in self.optimizer.optimizer.state.values():
            if "mu_product" in state:
                state["mu_product"] = torch.tensor(1.0)


@fault(bugs.MOMENTS_RESET, source="seen often", features=("mid-training",))
class SumOfSquaresForgotten(Zero1InParts):
    """Adagrad's sum of squares starts anew in every step."""

    fixed = _fixed("adagrad")

    def step(self, rates: Sequence[float]) -> None:
        for state in self.states():
            state["sum"].zero_()
        super().step(rates)


@fault(bugs.DECOUPLED_INSTEAD_OF_L2, source="seen often")
class DecayOfAdamW(Zero1InParts):
    """The case has Adam, and the parameters decay as AdamW's do."""

    fixed = _fixed("adam")

    def step(self, rates: Sequence[float]) -> None:
        groups = self.optimizer.optimizer.param_groups
        for rate, group in zip(rates, groups, strict=True):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.mul_(1 - rate * group["weight_decay"])
            group["kept"], group["weight_decay"] = group["weight_decay"], 0.0
        super().step(rates)
        for group in groups:
            group["weight_decay"] = group.pop("kept")


@fault(bugs.BETAS_SWAPPED, source="none known", features=("mid-training",))
class BetasOfAdamaxSwapped(Zero1InParts):
    """Adamax is given beta2 and beta1."""

    fixed = _fixed("adamax")

    def step(self, rates: Sequence[float]) -> None:
        self.exchange()
        super().step(rates)
        self.exchange()

    def exchange(self) -> None:
        """Exchange the betas of each group."""
        for group in self.optimizer.optimizer.param_groups:
            group["betas"] = group["betas"][::-1]


@fault(bugs.OPTIONS_OF_ANOTHER_GROUP, source="seen often", features=("groups",))
class RateOfTheFirstGroup(GroupsCollapse):
    """RMSprop has the learning rate of the first group for all of them."""

    fixed = _fixed("rmsprop")


@fault(bugs.GRADIENT_WITH_THE_WRONG_SIGN, source="none known")
class SignOfRprop(Zero1InParts):
    """Rprop, which sees the signs of gradients alone, sees the wrong ones."""

    fixed = _fixed("rprop")

    def step(self, rates: Sequence[float]) -> None:
        self.negate()
        super().step(rates)
        self.negate()

    def negate(self) -> None:
        """Change the sign of each gradient."""
        for gradient in self.optimizer.given():
            gradient.neg_()
