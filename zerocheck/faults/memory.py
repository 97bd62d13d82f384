"""Faults of memory: every number is right, and a rank holds more than it should.

Between steps, within a step, or in an implementation without a layout, where its declared stage and
its shards tell.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.textbook.reduction import Reduction
from ..adapters.textbook.unit import FlatParameter, Unit
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..compat import all_gather_single
from ..contract import Implementation
from ..optimizers import STATES
from .fault import fault
from .parts import Plantable, Zero3InParts


@fault(obligation="persistent", source="DS #3306, #3903; MG #6230")
class LeakByReference(Plantable, Zero2):
    """A list of reduced tensors keeps one flat gradient of each step."""

    def plant(self) -> None:
        self.sent: list[torch.Tensor] = []

    def end_step(self) -> None:
        self.sent += [gradient.shard.clone() for gradient in self.gradients[:1]]


@fault(bugs.OPTIMIZER_STATE_REPLICATED, source="seen often")
class StateReplicated(Plantable, Zero1):
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


@fault(bugs.WHOLE_GRADIENTS_KEPT, source="seen often")
class GradientsNotReleased(Plantable, Zero2):
    """Whole gradients are kept after their reduction, until the next step's replace them."""

    def plant(self) -> None:
        self.whole_gradients: dict[int, torch.Tensor] = {}

    def _launch(self) -> None:
        number = self._next
        self.whole_gradients[number] = self.gradients[number]._buffer()
        super()._launch()


@fault(
    bugs.GATHERED_PARAMETERS_KEPT, source="seen often", features=("reshard", "wrap-layer"),
    without=("no-blocks",),
)  # fmt: skip
class NotResharded(Plantable, Zero3):
    """Units stay gathered after the forward, though the case reshards."""

    def plant(self) -> None:
        sharding = replace(self.case.sharding, reshard=False)
        self.case = replace(self.case, sharding=sharding)


@fault(bugs.GATHERED_PARAMETERS_KEPT, source="seen often", features=("wrap-block",))
class RootNotReleased(Zero3):
    """The root stays gathered from one step to the next."""

    def _end_microbatch(self) -> None:
        for unit in (*self._close_calls(-1, ()), self.root):
            unit.reduce(self.reduction)
        self.reduction.finish()


@fault(bugs.GATHERED_PARAMETERS_KEPT, source="PT #101982", features=("frozen",))
class FrozenNotResharded(Zero3InParts):
    """Frozen units stay gathered, since a gradient hook was to release them."""

    def release(self, flat: FlatParameter) -> None:
        if flat.parameters[0].requires_grad:
            super().release(flat)


@fault(obligation="persistent", source="seen often")
class CopyKept(Plantable, Zero1):
    """The buckets are copied as master weights, which fp32 does not need."""

    def plant(self) -> None:
        self.master = [bucket.full.clone() for bucket in self.buckets]


@fault(bugs.ALIVE_AFTER_CLOSE, source="none known")
class AliveAfterClose(Zero1):
    """A class-level registry keeps the optimizer states of the last closed instance alive."""

    last: ClassVar[list[Any]] = []

    def close(self) -> None:
        type(self).last = [dict(state) for state in self.optimizer.optimizer.state.values()]
        super().close()


@lru_cache(maxsize=64)
def _is_matrix(parameter: torch.Tensor) -> bool:
    return parameter.dim() > 1


@fault(bugs.ALIVE_AFTER_CLOSE, source="an lru_cache of DeepSpeed's stage 3")
class CachedByParameter(Ddp):
    """A cached function of parameters keeps its arguments alive.

    DeepSpeed's stage 3 keeps a destroyed engine by an lru_cache.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.matrices = sum(_is_matrix(one) for one in model.parameters())


@fault(bugs.COPIED_BEFORE_IT_IS_FREED, source="FS #1186", features=("wrap-block",))
class CatBeforeFree(Zero3InParts):
    """Gradients are concatenated, and freed only then."""

    def reduce(self, flat: FlatParameter, reduction: Reduction) -> None:
        if flat.gradient is None or not flat.reduces:
            return
        reduction.make_room()
        parts = [one.new_zeros(one.numel()) for one in flat.parameters]
        for part, one in zip(parts, flat.parameters, strict=True):
            if one.grad is not None:
                part.copy_(one.grad.reshape(-1))
        whole = flat.shard.new_zeros(flat.partition.numel)
        for offset, part in zip(flat.partition.offsets, parts, strict=True):
            whole[offset : offset + part.numel()] = part
        reduction.launch(whole, flat.mine, flat.gradient)
        for one in flat.parameters:
            one.grad = None


@fault(obligation="peak", source="seen often", features=("wrap-block",))
class GatheredThenCopied(Zero3InParts):
    """A unit is gathered into a buffer and copied to its place: it is held twice."""

    def plant(self) -> None:
        self.fresh: dict[FlatParameter, torch.Tensor] = {}

    def fill(self, flat: FlatParameter) -> dist.Work | None:
        self.fresh[flat] = torch.empty_like(flat.full)
        return all_gather_single(self.fresh[flat], flat.shard, flat.group)

    def wait(self, flat: FlatParameter) -> bool:
        if arrives := super().wait(flat):
            # Not by the parameters: they do not notice that their memory is filled.
            flat.full.detach().copy_(self.fresh.pop(flat))
        return arrives


@fault(
    bugs.UNITS_NOT_FREED_BEFORE_THE_NEXT, source="seen often", features=("reshard", "wrap-layer")
)
class FreedAfterForward(Zero3):
    """Units are released when the whole forward is over, as if only the root released them."""

    def _after(self, unit: Unit, ahead: Collection[Unit]) -> None:
        release: Callable[[], None] = unit.release
        unit.release = lambda: None  # type: ignore[method-assign]
        super()._after(unit, ahead)
        unit.release = release  # type: ignore[method-assign]


@fault(bugs.UNITS_NOT_FREED_BEFORE_THE_NEXT, source="seen often", features=("wrap-layer",))
class FreedAfterBackward(Zero3):
    """Units are released when the whole backward is over.

    So it is in the many sharders whose backward hooks gather and never reshard.
    """

    def _close_calls(self, number: int, keep: Collection[Unit]) -> list[Unit]:
        return super()._close_calls(number, self.units)

    def _end_microbatch(self) -> None:
        super()._end_microbatch()
        for unit in self.units:
            unit.release()


@fault(bugs.WHOLE_GRADIENTS_KEPT_WITHIN_THE_STEP, source="seen often", features=("wrap-layer",))
class ReducedInOneGo(Plantable, Zero3):
    """All reductions are in flight at once, each with a whole gradient, until backward is over."""

    def plant(self) -> None:
        self.reduction.depth = 1 << 30


@fault(bugs.WHOLE_GRADIENTS_KEPT_WITHIN_THE_STEP, source="seen often", features=("wrap-layer",))
class BucketsInOneGo(Plantable, Zero2):
    """All reductions of ZeRO-2 are in flight at once: its buckets are as large as all gradients."""

    def plant(self) -> None:
        self.reduction.depth = 1 << 30


class _Unpredicted(Implementation):
    """An implementation that predicts nothing, as most of users do."""

    @classmethod
    def layout(cls, model: nn.Module, case: Case, rank: int) -> None:
        return None


@fault(bugs.WHOLE_GRADIENTS_KEPT, source="seen often")
class GradientsNotReleasedUnpredicted(_Unpredicted, GradientsNotReleased):
    """Whole gradients are kept after their reduction, and no layout says that they should not."""


@fault(bugs.OPTIMIZER_STATE_REPLICATED, source="seen often")
class StateReplicatedUnpredicted(_Unpredicted, StateReplicated):
    """Every rank allocates the whole optimizer state, and no layout says that it should not."""


@fault(bugs.PARAMETERS_HELD_TWICE, source="seen often")
class CopyKeptUnpredicted(_Unpredicted, CopyKept):
    """The buckets are copied as master weights, and no layout says that they should not be."""


@fault(bugs.GATHERED_PARAMETERS_KEPT, source="seen often", features=("wrap-block",))
class RootNotReleasedUnpredicted(_Unpredicted, RootNotReleased):
    """The root stays gathered from step to step, and no layout says that it should not."""


@fault(bugs.PARAMETERS_HELD_TWICE, source="seen often")
class BackupKept(_Unpredicted, Plantable, Ddp):
    """A copy of each parameter, to go back to, is never dropped."""

    def plant(self) -> None:
        parameters = self.built.model.parameters()
        self.backup: list[Any] = [torch.clone(one.detach()) for one in parameters]
