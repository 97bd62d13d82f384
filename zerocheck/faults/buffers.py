"""Faults in buffers, such as the running statistics of batch norm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..adapters.ddp.adapter import Ddp
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..contract import Built, Step, StepReport


class BuffersNotBroadcast(Ddp):
    """Rank 0's buffers are not broadcast (PT #178569). Flagged: buffers local."""

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        built = super().build(model, case, mesh)
        built.model.broadcast_buffers = False  # type: ignore[assignment]
        return built


class BuffersAveraged(Zero1):
    """Buffers are averaged over ranks, though declared local. Flagged: buffers averaged."""

    def train_step(self, step: Step) -> StepReport:
        report = super().train_step(step)
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer, group=self.group)
                buffer.div_(self.world_size)
        return report


class BuffersOfRank0(Zero2):
    """Rank 0's buffers overwrite the others', though declared local.

    Flagged: buffers of rank 0.
    """

    def train_step(self, step: Step) -> StepReport:
        report = super().train_step(step)
        for buffer in self.model.buffers():
            dist.broadcast(buffer, group_src=0, group=self.optimizer.group)
        return report


class BuffersRounded(Zero3):
    """All buffers are cast to half precision (FS #427). Flagged: buffers rounded to bf16."""

    def train_step(self, step: Step) -> StepReport:
        report = super().train_step(step)
        for buffer in self.model.buffers():
            buffer.copy_(buffer.bfloat16())
        return report


class BuffersForgotten(Fsdp2):
    """Buffers are reset after every step, as if never registered. Flagged: buffers not updated."""

    def train_step(self, step: Step) -> StepReport:
        before = [buffer.clone() for buffer in self.built.model.buffers()]
        report = super().train_step(step)
        for buffer, kept in zip(self.built.model.buffers(), before, strict=True):
            buffer.copy_(kept)
        return report


class BuffersSentOnce(Ddp):
    """Rank 0's buffers are broadcast only at the first forward of a step.

    Each microbatch is reduced, so they must be broadcast at every forward. Flagged: buffers.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        each = msgspec.structs.replace(case.sharding, sync="each")
        super().__init__(model, msgspec.structs.replace(case, sharding=each), mesh)

    def train_step(self, step: Step) -> StepReport:
        self.built.model.broadcast_buffers = True  # type: ignore[assignment]
        return super().train_step(step)

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        with super().accumulating(last=last):
            yield
        self.built.model.broadcast_buffers = False  # type: ignore[assignment]
