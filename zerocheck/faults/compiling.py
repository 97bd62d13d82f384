"""Faults of a compiled model, which estimated bounds must still detect."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.shared.compiling import compiles
from ..contract import Step, StepReport
from .fault import fault


@fault(bugs.GRADIENT_TIMES_W, source="HF transformers #45994", world=3, features=("compile",))
class CompiledLossTimesWorld(Fsdp2):
    """The loss is multiplied by W where the model is compiled."""

    def _objective(self, loss: torch.Tensor, weight: float, count: int) -> torch.Tensor:
        objective = super()._objective(loss, weight, count)
        return objective * self.case.world_size if compiles(self.case) else objective


@fault(
    bugs.LOCAL_GRADIENT_ONLY, source="seen in review", world=3, features=("compile",),
    without=("bucket-small", "static-graph", "block-batch-norm"),
)  # fmt: skip
class CompiledUnreduced(Ddp):
    """The backward that was compiled never reduces."""

    def train_step(self, step: Step) -> StepReport:
        model: Any = self.built.model
        with model.no_sync() if compiles(self.case) else nullcontext():
            return super().train_step(step)
