"""Faults of a compiled model, which estimated bounds must still detect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..adapters.ddp.adapter import Ddp
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.shared.compiling import compiles
from ..case.schema import Case
from ..contract import Built, Step, StepReport


class CompiledLossTimesWorld(Fsdp2):
    """The loss is multiplied by W where the model is compiled. Flagged: gradient x W."""

    def _objective(self, loss: torch.Tensor, weight: float, count: int) -> torch.Tensor:
        made = super()._objective(loss, weight, count)
        return made * self._ranks if compiles(self.case) else made

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        self._ranks = mesh.size()
        return super().build(model, case, mesh)


class CompiledUnreduced(Ddp):
    """The backward that was compiled never reduces. Flagged: local gradient only."""

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
