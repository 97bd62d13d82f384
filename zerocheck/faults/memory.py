"""Faults of memory: every number is right, and a rank holds more than it should."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.textbook.unit import FlatParameter
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..optimizers import STATES
from .fault import EVERY_STEP, fault
from .parts import Planted, Zero3InParts


@fault("zero2", "persistent", source="DS #3306, #3903; MG #6230", spares=EVERY_STEP)
class LeakByReference(Planted, Zero2):
    """A list of reduced tensors keeps one flat gradient of each step."""

    def plant(self) -> None:
        self.sent: list[torch.Tensor] = []

    def end_step(self) -> None:
        self.sent += [gradient.shard.clone() for gradient in self.gradients[:1]]


@fault(
    "zero1", "persistent", bugs.OPTIMIZER_STATE_REPLICATED, source="seen often", spares=EVERY_STEP
)
class StateReplicated(Planted, Zero1):
    """Every rank allocates the moments of whole buckets, and uses those of its shard."""

    def end_step(self) -> None:
        for bucket in self.buckets:
            inside = {piece.name: piece.inside for piece in bucket.pieces}
            for role in STATES:
                whole = torch.zeros_like(bucket.full)
                for one in self.optimizer.owned:
                    state = self.optimizer.optimizer.state.get(one.parameter, {})
                    if one.piece.name in inside and role in state:
                        part = whole[bucket.mine][inside[one.piece.name]]
                        state[role] = part.copy_(state[role])


@fault("zero2", "persistent", bugs.WHOLE_GRADIENTS_KEPT, source="seen often", spares=EVERY_STEP)
class GradientsNotReleased(Planted, Zero2):
    """Whole gradients are kept after their reduction, until the next step's replace them."""

    def plant(self) -> None:
        self.whole_gradients: dict[int, torch.Tensor] = {}

    def _launch(self) -> None:
        number = self._next
        self.whole_gradients[number] = self.gradients[number]._buffer()
        super()._launch()


@fault(
    "zero3", "persistent", bugs.GATHERED_PARAMETERS_KEPT, source="seen often", spares=EVERY_STEP,
    features=("reshard", "wrap-layer"), without=("no-blocks",),
)  # fmt: skip
class NotResharded(Planted, Zero3):
    """Units stay gathered after the forward, though the case reshards."""

    def plant(self) -> None:
        sharding = replace(self.case.sharding, reshard=False)
        self.case = replace(self.case, sharding=sharding)


@fault(
    "zero3", "persistent", bugs.GATHERED_PARAMETERS_KEPT, source="seen often", spares=EVERY_STEP,
    features=("wrap-block",),
)  # fmt: skip
class RootNotReleased(Zero3):
    """The root stays gathered from one step to the next."""

    def _end_microbatch(self) -> None:
        for unit in (*self._close_calls(-1, ()), self.root):
            unit.reduce(self.reduction)
        self.reduction.finish()


@fault(
    "zero3", "persistent", bugs.GATHERED_PARAMETERS_KEPT, source="PT #101982", spares=EVERY_STEP,
    features=("frozen",),
)  # fmt: skip
class FrozenNotResharded(Zero3InParts):
    """Frozen units stay gathered, since a gradient hook was to release them."""

    def release(self, flat: FlatParameter) -> None:
        if flat.parameters[0].requires_grad:
            super().release(flat)


@fault("zero1", "persistent", source="seen often", spares=EVERY_STEP)
class CopyKept(Planted, Zero1):
    """The buckets are copied as master weights, which fp32 does not need."""

    def plant(self) -> None:
        self.master = [bucket.full.clone() for bucket in self.buckets]


@fault("zero1", "release", bugs.ALIVE_AFTER_CLOSE, source="none known", spares=EVERY_STEP)
class AliveAfterClose(Zero1):
    """A class-level registry keeps the optimizer states of the last closed instance alive."""

    last: ClassVar[list[Any]] = []

    def close(self) -> None:
        type(self).last = [dict(state) for state in self.optimizer.optimizer.state.values()]
        super().close()


@lru_cache(maxsize=64)
def _is_matrix(parameter: torch.Tensor) -> bool:
    return parameter.dim() > 1


@fault(
    "ddp", "release", bugs.ALIVE_AFTER_CLOSE, source="an lru_cache of DeepSpeed's stage 3",
    spares=EVERY_STEP,
)  # fmt: skip
class CachedByParameter(Ddp):
    """A cached function of parameters keeps its arguments alive.

    DeepSpeed's stage 3 keeps a destroyed engine by an lru_cache.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.matrices = sum(_is_matrix(one) for one in model.parameters())
