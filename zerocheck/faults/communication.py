"""Faults in communication: the numbers are right, and more is sent than necessary."""

from __future__ import annotations

import torch
import torch.distributed as dist
from msgspec.structs import replace as changed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.textbook.reduction import Reduction
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..compat import reduce_scatter_single, wait
from ..contract import Built, Step, StepReport
from .fault import fault
from .parts import Plantable, with_callback


@fault(
    bugs.ONE_COLLECTIVE_PER_PARAMETER, source="DS #7418", features=("find-unused",),
    without=("bucket-small", "parameter-empty", "static-graph"),
)  # fmt: skip
class OneCollectivePerParameter(Ddp):
    """A bucket counts as full from the first parameter on."""

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        one_each = changed(case, sharding=changed(case.sharding, bucket=1))
        return super().build(model, one_each, mesh)


class _AllReduces(Reduction):
    def launch(self, whole: torch.Tensor, mine: slice, into: torch.Tensor) -> None:
        self.make_room()
        work = dist.all_reduce(whole, group=self.group, async_op=True)
        self._in_flight.append((work, whole[mine], into))


@fault(bugs.IN_PLACE_OF(other="all_reduce", kind="reduce_scatter"), source="DS #4946")
class AllReduceForReduceScatter(Plantable, Zero2):
    """Buckets are all-reduced, and all but the rank's own shard is thrown away."""

    def plant(self) -> None:
        self.reduction = _AllReduces(self.group)


@fault(bugs.IN_PLACE_OF(other="all_reduce", kind="reduce_scatter"), source="DS #4946")
class AllReduceForReduceScatterOfUnits(Plantable, Zero3):
    """Units of ZeRO-3 are all-reduced, and all but the own shard is thrown away."""

    def plant(self) -> None:
        self.reduction = _AllReduces(self.group)


@fault(bugs.GATHERED_TWICE, source="seen often")
class GatheredTwice(Zero2):
    """Updated parameters are gathered after the update, and once more."""

    def _publish(self) -> None:
        super()._publish()
        super()._publish()


@fault(bugs.REDUCED_WITH_EACH_MICROBATCH, source="seen often", microbatches=2)
class ReducedWithEachMicrobatch(Zero1):
    """The sum so far is reduced with each microbatch, and used after the last."""

    def train_step(self, step: Step) -> StepReport:
        self._begun = False
        return super().train_step(with_callback(step, self._reduce_copies))

    def _reduce_copies(self) -> None:
        if self._begun:
            for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
                whole = gradients.clone()
                wait(reduce_scatter_single(whole[bucket.mine], whole, self.group))
        self._begun = True


@fault(bugs.SENT_IN(dtype="float32"), source="seen often", features=("mixed-dtypes",))
class SentInFp32(Zero1):
    """Gradients in bf16 are sent in fp32."""

    def _reduce(self) -> None:
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            whole = gradients.float()
            part = whole[bucket.mine]
            wait(reduce_scatter_single(part, whole, self.group))
            bucket.gradient.copy_(part.div_(self.world_size))
        self.replicas.average(bucket.gradient for bucket in self.buckets)
        self.reduced = True


@fault(bugs.CALLED_ONCE_MORE, source="seen often")
class BarrierInEachStep(Plantable, Zero2):
    """Ranks wait for each other at the end of each step."""

    def end_step(self) -> None:
        dist.barrier(group=self.group)
