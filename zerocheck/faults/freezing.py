"""Faults with parameters that are unfrozen later."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..adapters.ddp.adapter import Ddp
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.textbook.zero1 import Zero1
from ..case.schema import Case
from ..contract import Built


class RequiresGradCached(Fsdp2):
    """`requires_grad` is cached when the model is wrapped. Flagged: not unfrozen."""

    def unfreeze(self, names: Collection[str]) -> None:
        pass


class NotWrappedAgain(Ddp):
    """DDP keeps its reducer, which does not reduce unfrozen parameters (Lightning #20340).

    Flagged: local gradient only.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.built: Built = replace(self.built, rewrap=None)


class FrozenDecays(Zero1):
    """Parameters to be unfrozen later have a gradient of zeros before, so AdamW decays them.

    Flagged: gradient of a frozen parameter.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        for one in self.optimizer.owned:
            one.parameter.grad = one.gradient
