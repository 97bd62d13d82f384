"""Faults in waiting: right if a collective is already over, wrong if it is late."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .. import causes as bugs
from ..adapters.textbook.reduction import Reduction
from ..adapters.textbook.unit import Unit
from ..adapters.textbook.zero2 import GradientBucket, Zero2
from ..adapters.textbook.zero3 import Zero3
from ..compat import reduce_scatter_single, wait
from ..contract import Step, StepReport
from .fault import fault
from .parts import Plantable


class _InFlight(Reduction):
    """Reductions that stay in flight until the step's last microbatch, each with its own result.

    No fault, as long as the input buffers are not overwritten.
    """

    microbatches = 0

    def launch(self, whole: torch.Tensor, mine: slice, into: torch.Tensor) -> None:
        part = torch.empty_like(into)
        self._in_flight.append((self.send(part, whole), part, into))

    def send(self, part: torch.Tensor, whole: torch.Tensor) -> dist.Work | None:
        """Launch the reduce-scatter."""
        return reduce_scatter_single(part, whole, self.group)

    def finish(self) -> None:
        self.microbatches -= 1
        if self.microbatches == 0:
            super().finish()


class _KeptBuffer(GradientBucket):
    """Gradient bucket whose flat buffer is allocated once."""

    kept: torch.Tensor | None = None

    def _buffer(self) -> torch.Tensor:
        if self._whole is None:
            if self.kept is None:
                self.kept = torch.zeros_like(self.bucket.full)
            self._whole = self.kept.zero_()
        return self._whole


@fault(
    obligation="gradient", source="DS PR#5606", features=("delays", "microbatches", "bucket-small"),
    microbatches=3, sometimes=0.35,
    attributed=r"microbatch.* counts? \S+ times|weights of local gradients",
)  # fmt: skip
class BucketReused(Plantable, Zero2):
    """A bucket takes the next microbatch's gradients while it is being reduced."""

    reduction: _InFlight

    def plant(self) -> None:
        self.reduction = _InFlight(self.group)
        for gradient in self.gradients:
            gradient.__class__ = _KeptBuffer

    def train_step(self, step: Step) -> StepReport:
        self.reduction.microbatches = len(step.microbatches)
        return super().train_step(step)


class _Pingpong(_InFlight):
    """Reductions from two buffers in turn, each waited for before its buffer is filled again."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.buffers: list[torch.Tensor | None] = [None, None]
        self.works: list[dist.Work | None] = [None, None]
        self.index = 0

    def send(self, part: torch.Tensor, whole: torch.Tensor) -> dist.Work | None:
        index, self.index = self.index, 1 - self.index
        wait(self.works[index])
        buffer = self.buffers[index]
        if buffer is None or buffer.numel() < whole.numel() or buffer.dtype != whole.dtype:
            buffer = self.buffers[index] = torch.empty_like(whole)
        sent = buffer[: whole.numel()].copy_(whole)
        self.works[index] = super().send(part, sent)
        return self.works[index]


class _Reset(_Pingpong):
    def finish(self) -> None:
        super().finish()
        self.index, self.works = 0, [None, None]


@fault(
    obligation="gradient", source="DS PR#7805", features=("delays", "microbatches", "bucket-small"),
    microbatches=3, sometimes=0.33,
    attributed=r"microbatch.* counts? \S+ times|weights of local gradients",
)  # fmt: skip
class PingpongReset(BucketReused):
    """Each microbatch starts again with the first of two send buffers, still being sent."""

    def plant(self) -> None:
        self.reduction = _Reset(self.group)


class _Trusting(Unit):
    """Unit that does not wait while `trusts` is set."""

    trusts = False

    def wait(self) -> None:
        if not self.trusts:
            super().wait()


@fault(
    bugs.UNINITIALISED_MEMORY, obligation="loss", source="DS PR#5606", features=("delays",),
    sometimes=0.58,
)  # fmt: skip
class PrefetchNotAwaited(Plantable, Zero3):
    """A prefetched unit is assumed to have arrived."""

    def plant(self) -> None:
        for unit in self.units:
            unit.__class__ = _Trusting

    def _before(self, unit: Unit, *given: Any) -> None:
        assert isinstance(unit, _Trusting)
        unit.trusts = unit.gathered and not self._in_backward
        super()._before(unit, *given)
        unit.trusts = False
