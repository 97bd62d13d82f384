"""Faults within a step: memory is right at the end of each phase, and too large before."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.textbook.reduction import Reduction
from ..adapters.textbook.unit import FlatParameter, Unit
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..compat import all_gather_single
from .fault import EVERY_STEP, fault


class _OfFlats(Zero3):
    """Replace the class of all flat parameters."""

    kind: type[FlatParameter] = FlatParameter

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        for flat in self.flats:
            flat.__class__ = self.kind


class _Concatenating(FlatParameter):
    def reduce(self, reduction: Reduction) -> None:
        if self.gradient is None or not self.parameters[0].requires_grad:
            return
        reduction.make_room()
        parts = [one.new_zeros(one.numel()) for one in self.parameters]
        for part, one in zip(parts, self.parameters, strict=True):
            if one.grad is not None:
                part.copy_(one.grad.reshape(-1))
        whole = self.shard.new_zeros(self.partition.numel)
        for offset, part in zip(self.partition.offsets, parts, strict=True):
            whole[offset : offset + part.numel()] = part
        reduction.launch(whole, self.mine, self.gradient)
        for one in self.parameters:
            one.grad = None


@fault(
    "zero3", "peak", bugs.COPIED_BEFORE_IT_IS_FREED, source="FS #1186", spares=EVERY_STEP,
    features=("wrap-block",),
)  # fmt: skip
class CatBeforeFree(_OfFlats):
    """Gradients are concatenated, and freed only then."""

    kind = _Concatenating


class _Copying(FlatParameter):
    fresh: torch.Tensor | None = None

    def gather(self) -> None:
        if not self.gathered:
            self.storage.resize_(self._bytes)
            self.fresh = torch.empty_like(self.full)
            self._work = all_gather_single(self.fresh, self.shard, self.group)
            self.gathered = True

    def wait(self) -> None:
        super().wait()
        if self.fresh is not None:
            # Not by the parameters: they do not notice that their memory is filled.
            self.full.detach().copy_(self.fresh)
            self.fresh = None


@fault("zero3", "peak", source="seen often", spares=EVERY_STEP, features=("wrap-block",))
class GatheredThenCopied(_OfFlats):
    """A unit is gathered into a buffer and copied to its place: it is held twice."""

    kind = _Copying


@fault(
    "zero3", "peak", bugs.UNITS_NOT_FREED_BEFORE_THE_NEXT, source="seen often", spares=EVERY_STEP,
    features=("reshard", "wrap-layer"),
)  # fmt: skip
class FreedAfterForward(Zero3):
    """Units are released when the whole forward is over, as if only the root released them."""

    def _after(self, unit: Unit, ahead: Collection[Unit]) -> None:
        release: Callable[[], None] = unit.release
        unit.release = lambda: None  # type: ignore[method-assign]
        super()._after(unit, ahead)
        unit.release = release  # type: ignore[method-assign]


@fault(
    "zero3", "peak", bugs.UNITS_NOT_FREED_BEFORE_THE_NEXT, source="seen often", spares=EVERY_STEP,
    features=("wrap-layer",),
)  # fmt: skip
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


@fault(
    "zero3", "peak", bugs.WHOLE_GRADIENTS_KEPT_WITHIN_THE_STEP, source="seen often",
    spares=EVERY_STEP, features=("wrap-layer",),
)  # fmt: skip
class ReducedInOneGo(Zero3):
    """All reductions are in flight at once, each with a whole gradient, until backward is over."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.reduction.depth = 1 << 30


@fault(
    "zero2", "peak", bugs.WHOLE_GRADIENTS_KEPT_WITHIN_THE_STEP, source="seen often",
    spares=EVERY_STEP, features=("wrap-layer",),
)  # fmt: skip
class BucketsInOneGo(Zero2):
    """All reductions of ZeRO-2 are in flight at once: its buckets are as large as all gradients."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.reduction.depth = 1 << 30
