"""Faults within a step: memory is right at the end of each phase, and too large before."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
import torch.distributed as dist

from .. import causes as bugs
from ..adapters.textbook.reduction import Reduction
from ..adapters.textbook.unit import FlatParameter, Unit
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from ..compat import all_gather_single
from .fault import EVERY_STEP, fault
from .parts import Planted, Zero3InParts


@fault(
    "zero3", "peak", bugs.COPIED_BEFORE_IT_IS_FREED, source="FS #1186", spares=EVERY_STEP,
    features=("wrap-block",),
)  # fmt: skip
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


@fault("zero3", "peak", source="seen often", spares=EVERY_STEP, features=("wrap-block",))
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
class ReducedInOneGo(Planted, Zero3):
    """All reductions are in flight at once, each with a whole gradient, until backward is over."""

    def plant(self) -> None:
        self.reduction.depth = 1 << 30


@fault(
    "zero2", "peak", bugs.WHOLE_GRADIENTS_KEPT_WITHIN_THE_STEP, source="seen often",
    spares=EVERY_STEP, features=("wrap-layer",),
)  # fmt: skip
class BucketsInOneGo(Planted, Zero2):
    """All reductions of ZeRO-2 are in flight at once: its buckets are as large as all gradients."""

    def plant(self) -> None:
        self.reduction.depth = 1 << 30
