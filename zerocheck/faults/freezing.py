"""Faults with parameters that are unfrozen later."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..case.schema import Case
from ..contract import Built
from ..implementations.ddp import Ddp
from ..implementations.fsdp2 import Fsdp2
from ..implementations.textbook.zero1 import Zero1


class RequiresGradCached(Fsdp2):
    """Which parameters train is read once, when the model is wrapped. Flagged: not unfrozen."""

    def unfreeze(self, names: Collection[str]) -> None:
        pass


class NotWrappedAgain(Ddp):
    """DDP keeps the reducer from before the unfreezing, which does not reduce what is new
    (Lightning #20340).

    Flagged: local gradient only.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.built: Built = replace(self.built, rewrap=None)


class FrozenDecays(Zero1):
    """What will be unfrozen has a gradient of zeros until then, so AdamW decays it.

    Flagged: gradient of a frozen parameter.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        for one in self.optimizer.owned:
            one.parameter.grad = one.gradient
