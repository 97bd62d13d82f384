"""Faults with parameters that are unfrozen later."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.textbook.zero1 import Zero1
from ..contract import Built
from .fault import fault
from .parts import Planted


# Without a gradient other kernels run there: the loss differs in its last bits.
@fault(
    "fsdp2", "gradient", bugs.NOT_UNFROZEN, source="seen often", features=("unfreeze",),
    without=("block-conv", "block-recurrent"),
)  # fmt: skip
class RequiresGradCached(Fsdp2):
    """`requires_grad` is cached when the model is wrapped."""

    def unfreeze(self, names: Collection[str]) -> None:
        pass


@fault(
    "ddp", "gradient", bugs.LOCAL_GRADIENT_ONLY, source="Lightning #20340", world=3,
    features=("unfreeze",), without=("sometimes-used", "static-graph"),
)  # fmt: skip
class NotWrappedAgain(Planted, Ddp):
    """DDP keeps its reducer, which does not reduce unfrozen parameters."""

    def plant(self) -> None:
        self.built: Built = replace(self.built, rewrap=None)


@fault(
    "zero1", "gradient", bugs.GRADIENT_OF_A_FROZEN_PARAMETER, source="FS #605 (unused parameters)",
    features=("unfreeze",),
)  # fmt: skip
class FrozenDecays(Planted, Zero1):
    """Parameters to be unfrozen later have a gradient of zeros before, so AdamW decays them."""

    def plant(self) -> None:
        for one in self.optimizer.owned:
            one.parameter.grad = one.gradient
