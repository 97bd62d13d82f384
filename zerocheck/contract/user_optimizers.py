"""User-defined optimizer classes: the state that they hide, and the effects of their `step()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..case.schema import Case
from ..case.shapes import parameter_dtypes
from ..errors import Unsupported
from ..machine.devices import placed
from .implementation import Hidden
from .optimizers import Optimizers
from .states import States


@dataclass(frozen=True)
class UserOptimizers:
    """Properties of an optimizer that decide how it can be observed.

    name: of its class, empty for one of torch. opaque: it has no parameter groups. hides: no rank
    can see states of it, so that it is judged by its parameters. parts: each rank has states of
    some parameters only. reduces: its `step()` may reduce gradients, so that they are looked at
    after it. rewraps: `Built.rewrap` is given.
    """

    name: str = ""
    opaque: bool = False
    hides: bool = False
    parts: bool = False
    reduces: bool = False
    rewraps: bool = False

    @property
    def hidden(self) -> tuple[Hidden, ...]:
        """Value for Implementation.hides."""
        states: tuple[Hidden, ...] = ("states",) if self.hides else ()
        owners: tuple[Hidden, ...] = ("owners",) if self.reduces else ()
        return (*states, *owners)

    @classmethod
    def of(
        cls, optimizers: Optimizers, states: States, built: Any, mesh: DeviceMesh
    ) -> UserOptimizers:
        """Inspect the result of `build`. Every rank calls this, with the same result."""
        opaque, reduces = optimizers.opaque, optimizers.reduces
        if not (opaque or reduces):
            held = {
                id(p) for one in optimizers.inner for g in one.param_groups for p in g["params"]
            }
            given = {id(p) for group in optimizers.groups() for p in group["params"]}
            return cls(parts=bool(given - held))
        own = [one for one in optimizers.given if not opaque or one not in optimizers.grouped]
        hides = not _somewhere(not states.hidden, mesh)
        rewraps = built.rewrap is not None
        name = type(own[0]).__name__
        return cls(name, opaque, hides, parts=True, reduces=reduces, rewraps=rewraps)

    def check(self, case: Case) -> None:
        """Raise Unsupported for requirements of the case that such an optimizer cannot show."""
        if not self.name:
            return
        training = case.training
        reason = ""
        if self.reduces and training.clip is not None:
            reason = (
                f"the case clips gradients, and {self.name}.step() may be what reduces them: give "
                "Built.clip, or fix training.clip to None"
            )
        elif self.opaque and self.hides and case.optimizer.schedule != "constant":
            reason = f"{self.name} has no param_groups, so its learning rate cannot be set"
        elif self.hides and case.optimizer.amsgrad:
            reason = f"{self.name} shows no states, so amsgrad cannot be judged"
        elif training.unfreeze is not None and not self.rewraps:
            reason = (
                f"{self.name} may know only what was trainable when it was made: give "
                "Built.rewrap, which is called after parameters were unfrozen"
            )
        elif self.hides and set(parameter_dtypes(case.model).values()) != {"fp32"}:
            reason = f"{self.name} shows no states, so only parameters of fp32 can be judged"
        elif self.opaque and training.loss_scale is not None:
            reason = f"{self.name} has no param_groups, which torch.amp.GradScaler needs"
        if reason:
            raise Unsupported(reason)

    def check_restores(self) -> None:
        """Raise Unsupported if there is no state that could be restored."""
        if self.hides:
            raise Unsupported(
                f"{self.name} shows no states, so it cannot start in mid-training: give "
                "Built(states=...), or keep torch's optimizer in an attribute of it"
            )

    def check_checkpointed(self) -> None:
        """Raise Unsupported if torch's state-dict API cannot see all states."""
        if self.name or self.parts:
            raise Unsupported(
                "torch's get_state_dict does not see states that each rank has of some parameters "
                "only; save(), load() and export() of its own are needed"
            )


def _somewhere(condition: bool, mesh: DeviceMesh) -> bool:
    """Return True if a condition holds on any rank."""
    count = torch.tensor(float(condition), device=placed(mesh.device_type))
    dist.all_reduce(count)
    return bool(count > 0)


def reduced(built: Any) -> bool:
    """Return True if gradients are reduced before `step()`, as far as `build` shows.

    By a wrapper of torch in the backward, or where `Built.accumulate` or `Built.clip` end it.
    """
    model: nn.Module = built.model
    if built.clip is not None or built.accumulate is not None:
        return True
    kinds = (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)
    if any(isinstance(module, kinds) for module in model.modules()):
        return True
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


Gradients = list[torch.Tensor | None]


def gradients_of(model: nn.Module) -> Gradients:
    """Copy the gradients of all parameters."""
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def changed(before: Gradients, after: Gradients) -> bool:
    """Return True if any bit of any gradient differs."""
    for one, other in zip(before, after, strict=True):
        if (one is None) != (other is None):
            return True
        if one is not None and other is not None:
            bits = (tensor.reshape(-1).view(torch.uint8) for tensor in (one, other))
            if not torch.equal(*bits):
                return True
    return False
