"""Faults in buffers, such as the running statistics of batch norm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..contract import Step, StepReport
from .fault import fault
from .parts import Plantable, average


@fault(
    bugs.BUFFERS_LOCAL, source="PT #178569; LlamaFactory #10820",
    features=("block-batch-norm", "several-steps"), world=3,
)  # fmt: skip
class BuffersNotBroadcast(Plantable, Ddp):
    """Rank 0's buffers are not broadcast."""

    def plant(self) -> None:
        self.built.model.broadcast_buffers = False  # type: ignore[assignment]


@fault(
    bugs.BUFFERS_LOCAL, source="seen often", features=("block-batch-norm", "microbatches"),
    without=("static-graph",), world=3, microbatches=3,
)  # fmt: skip
class BuffersSentOnce(Ddp):
    """Rank 0's buffers are broadcast only at the first forward of a step.

    Each microbatch is reduced, so they must be broadcast at every forward.
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


@fault(bugs.BUFFERS_AVERAGED, source="seen often", features=("block-batch-norm",), world=3)
class BuffersAveraged(Plantable, Zero1):
    """Buffers are averaged over ranks, though declared local."""

    def end_step(self) -> None:
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                average(buffer, self.group)


@fault(bugs.BUFFERS_OF_RANK_0, source="seen often", features=("block-batch-norm",), world=3)
class BuffersOfRank0(Plantable, Zero2):
    """Rank 0's buffers overwrite the others', though declared local."""

    def end_step(self) -> None:
        for buffer in self.model.buffers():
            dist.broadcast(buffer, group_src=0, group=self.optimizer.group)


@fault(bugs.BUFFERS_ROUNDED_TO_BF16, source="FS #427", features=("block-batch-norm",))
class BuffersRounded(Plantable, Zero3):
    """All buffers are cast to half precision."""

    def end_step(self) -> None:
        for buffer in self.model.buffers():
            buffer.copy_(buffer.bfloat16())


@fault(bugs.BUFFERS_NOT_UPDATED, source="seen often", features=("block-batch-norm",))
class BuffersForgotten(Fsdp2):
    """Buffers are reset after every step, as if never registered."""

    def train_step(self, step: Step) -> StepReport:
        before = [buffer.clone() for buffer in self.built.model.buffers()]
        report = super().train_step(step)
        for buffer, kept in zip(self.built.model.buffers(), before, strict=True):
            buffer.copy_(kept)
        return report
