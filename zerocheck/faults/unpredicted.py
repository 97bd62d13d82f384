"""Faults of memory in implementations without a layout: their declared stage and shards tell."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..case.schema import Case
from ..contract import Implementation
from .fault import EVERY_STEP, fault
from .memory import CopyKept, GradientsNotReleased, RootNotReleased, StateReplicated
from .parts import Planted


class _Unpredicted(Implementation):
    """An implementation that predicts nothing, as most of users do."""

    @classmethod
    def layout(cls, model: nn.Module, case: Case, rank: int) -> None:
        return None


@fault("zero2", "persistent", bugs.WHOLE_GRADIENTS_KEPT, source="seen often", spares=EVERY_STEP)
class GradientsNotReleasedUnpredicted(_Unpredicted, GradientsNotReleased):
    """Whole gradients are kept after their reduction, and no layout says that they should not."""


@fault(
    "zero1", "persistent", bugs.OPTIMIZER_STATE_REPLICATED, source="seen often", spares=EVERY_STEP
)
class StateReplicatedUnpredicted(_Unpredicted, StateReplicated):
    """Every rank allocates the whole optimizer state, and no layout says that it should not."""


@fault("zero1", "persistent", bugs.PARAMETERS_HELD_TWICE, source="seen often", spares=EVERY_STEP)
class CopyKeptUnpredicted(_Unpredicted, CopyKept):
    """The buckets are copied as master weights, and no layout says that they should not be."""


@fault(
    "zero3", "persistent", bugs.GATHERED_PARAMETERS_KEPT, source="seen often", spares=EVERY_STEP,
    features=("wrap-block",),
)  # fmt: skip
class RootNotReleasedUnpredicted(_Unpredicted, RootNotReleased):
    """The root stays gathered from step to step, and no layout says that it should not."""


@fault("ddp", "persistent", bugs.PARAMETERS_HELD_TWICE, source="seen often", spares=EVERY_STEP)
class BackupKept(_Unpredicted, Planted, Ddp):
    """A copy of each parameter, to go back to, is never dropped."""

    def plant(self) -> None:
        parameters = self.built.model.parameters()
        self.backup: list[Any] = [torch.clone(one.detach()) for one in parameters]
