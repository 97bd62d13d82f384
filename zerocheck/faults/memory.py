"""Faults of memory: every number is right, and a rank holds more than it should."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..adapters.ddp.adapter import Ddp
from ..adapters.textbook.sharded_optimizer import MOMENTS
from ..adapters.textbook.unit import FlatParameter
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..contract import Step, StepReport


class LeakByReference(Zero2):
    """A list of reduced tensors keeps one flat gradient of each step (DS #3306, #3903; MG #6230).

    Flagged: memory that its layout has not, one buffer more after each step.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.sent: list[torch.Tensor] = []

    def train_step(self, step: Step) -> StepReport:
        report = super().train_step(step)
        self.sent += [gradient.shard.clone() for gradient in self.gradients[:1]]
        return report


class StateReplicated(Zero1):
    """Every rank allocates the moments of whole buckets, and uses those of its shard.

    Flagged: optimizer state replicated.
    """

    def train_step(self, step: Step) -> StepReport:
        report = super().train_step(step)
        for bucket in self.buckets:
            inside = {piece.name: piece.inside for piece in bucket.pieces}
            for role in MOMENTS:
                whole = torch.zeros_like(bucket.full)
                for one in self.optimizer.owned:
                    state = self.optimizer.optimizer.state.get(one.parameter, {})
                    if one.piece.name in inside and role in state:
                        part = whole[bucket.mine][inside[one.piece.name]]
                        state[role] = part.copy_(state[role])
        return report


class GradientsNotReleased(Zero2):
    """Whole gradients are kept after their reduction, until the next step's replace them.

    Flagged: whole gradients kept.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.whole_gradients: dict[int, torch.Tensor] = {}

    def _launch(self) -> None:
        number = self._next
        self.whole_gradients[number] = self.gradients[number]._buffer()
        super()._launch()


class NotResharded(Zero3):
    """Units stay gathered after the forward, though the case reshards.

    Flagged: gathered parameters kept.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.case = replace(case, sharding=replace(case.sharding, reshard=False))


class RootNotReleased(Zero3):
    """The root stays gathered from one step to the next. Flagged: gathered parameters kept."""

    def _end_microbatch(self) -> None:
        for unit in (*self._close_calls(-1, ()), self.root):
            unit.reduce(self.reduction)
        self.reduction.finish()


class _Kept(FlatParameter):
    def release(self) -> None:
        if self.parameters[0].requires_grad:
            super().release()


class FrozenNotResharded(Zero3):
    """Frozen units stay gathered, since a gradient hook was to release them (PT #101982).

    Flagged: gathered parameters kept.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        for flat in self.flats:
            if not flat.parameters[0].requires_grad:
                flat.__class__ = _Kept


class CopyKept(Zero1):
    """The buckets are copied as master weights, which fp32 does not need. Flagged: held twice."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.master = [bucket.full.clone() for bucket in self.buckets]


class AliveAfterClose(Zero1):
    """A class-level registry keeps the optimizer states of the last closed instance alive.

    Flagged: alive after close.
    """

    last: ClassVar[list[Any]] = []

    def close(self) -> None:
        type(self).last = [dict(state) for state in self.optimizer.optimizer.state.values()]
        super().close()


@lru_cache(maxsize=64)
def _is_matrix(parameter: torch.Tensor) -> bool:
    return parameter.dim() > 1


class CachedByParameter(Ddp):
    """A cached function of parameters keeps its arguments alive.

    DeepSpeed's stage 3 keeps a destroyed engine by an lru_cache. Flagged: alive after close.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.matrices = sum(_is_matrix(one) for one in model.parameters())
