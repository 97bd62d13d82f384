"""Faults of a compiled model, which estimated bounds must still detect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.shared.compiling import compiles
from ..case.schema import Case
from ..contract import Built, Step, StepReport
from .fault import fault


@fault(
    "fsdp2", "gradient", bugs.GRADIENT_TIMES_W, source="HF transformers #45994", world=3,
    features=("compile",),
)  # fmt: skip
class CompiledLossTimesWorld(Fsdp2):
    """The loss is multiplied by W where the model is compiled."""

    def _objective(self, loss: torch.Tensor, weight: float, count: int) -> torch.Tensor:
        made = super()._objective(loss, weight, count)
        return made * self._ranks if compiles(self.case) else made

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        self._ranks = mesh.size()
        return super().build(model, case, mesh)


@fault(
    "ddp", "gradient", bugs.LOCAL_GRADIENT_ONLY, source="seen in review", world=3,
    features=("compile",), without=("bucket-small", "static-graph", "block-batch-norm"),
)  # fmt: skip
class CompiledUnreduced(Ddp):
    """The backward that was compiled never reduces."""

    def train_step(self, step: Step) -> StepReport:
        if not compiles(self.case):
            return super().train_step(step)
        with self._alone():
            return super().train_step(step)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        model: Any = self.built.model
        with model.no_sync():
            yield
