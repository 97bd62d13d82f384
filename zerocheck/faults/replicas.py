"""Faults of a mesh: sums, divisions and groups of the wrong axis, or of one host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from .. import causes as bugs
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.textbook.sharded_optimizer import OwnedPiece, ShardedOptimizer
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..contract import Step, StepReport
from .fault import fault
from .parts import Plantable, Zero1InParts


@fault(
    bugs.NOT_REDUCED_OVER_REPLICAS, source="PT #154888; verl #7493", world=4, features=("two-axes",)
)
class NotOverReplicas(Plantable, Zero3):
    """Gradients are reduced over the shard axis, never over the replicate axis."""

    def plant(self) -> None:
        self.replicas.count = 1


@fault(
    bugs.NOT_REDUCED_OVER_REPLICAS, source="seen in review", world=4, microbatches=2,
    features=("two-axes",),
)  # fmt: skip
class NotOverReplicasWithAccumulation(Plantable, Zero1):
    """With several microbatches the reduction over replicas is deferred and forgotten."""

    def plant(self) -> None:
        if self.case.training.microbatches > 1:
            self.replicas.count = 1


@fault(
    bugs.LAST_MICROBATCH_ONLY_OVER_REPLICAS, source="PT #125484", world=4, microbatches=3,
    features=("two-axes",),
)  # fmt: skip
class LastMicrobatchOverReplicas(Zero2):
    """Gradients reduced over shards before the last microbatch are left out of the all-reduce."""

    aside: Sequence[torch.Tensor] = ()
    done = 0

    def _end_microbatch(self) -> None:
        super()._end_microbatch()
        self.done += 1
        if self.done % self.case.training.microbatches == self.case.training.microbatches - 1:
            self.aside = [gradient.shard.clone() for gradient in self.gradients]
            self._clear_gradients()

    def _reduce(self) -> None:
        super()._reduce()
        for wide, before in zip(self.wide, self.aside, strict=False):
            wide.narrow.add_(before)
            wide.widen()
        self.aside = ()


@fault(
    bugs.GRADIENT_TIMES_AXIS(axis="replicate"), source="PT #155903", world=4, features=("two-axes",)
)
class DividedByShardsOnly(Plantable, Fsdp2):
    """The divide factor is the size of the shard axis, as without replicas.

    torch then sums over the replicate axis.
    """

    def plant(self) -> None:
        for module in self.built.model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(self.case.axes.size("shard")))


@fault(
    bugs.GRADIENT_OVER_AXIS(axis="replicate"), source="seen often", world=4, features=("two-axes",)
)
class DividedByReplicasTwice(Plantable, Zero3):
    """The sum over shards is divided by the number of all ranks, then averaged over replicas."""

    def plant(self) -> None:
        self.reduction.world_size = self.case.world_size


@fault(bugs.CUT_OVER_THE_REPLICATE_AXIS, source="seen in review", world=4, features=("two-axes",))
class AxesExchanged(Zero1):
    """The first axis of the mesh is taken for the shard axis, and the second for the replicas."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        other = {"shard": "replicate", "replicate": "shard"}
        exchanged: Any = SimpleNamespace(
            mesh_dim_names=mesh.mesh_dim_names,
            device_type=mesh.device_type,
            get_group=lambda axis: mesh.get_group(other[axis]),
        )
        super().__init__(model, case, exchanged)


@fault(bugs.CUT_OVER_ALL_RANKS, source="FS #907", world=4, features=("two-axes",))
class CutOverAllRanks(Zero2):
    """The replicate axis is ignored: one copy is sharded over all ranks."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        one_axis: Any = SimpleNamespace(
            mesh_dim_names=("shard",),
            device_type=mesh.device_type,
            get_group=lambda axis: dist.group.WORLD,
        )
        super().__init__(model, case, one_axis)


@fault(
    bugs.COPIES_DIFFER, source="PT #90465", world=4, features=("two-axes",),
    without=("mid-training",),
)  # fmt: skip
class ReplicasStartApart(Plantable, Zero3):
    """Initial weights are broadcast within each replica, not between replicas."""

    def plant(self) -> None:
        if not self.replicas.first:
            for flat in self.flats:
                flat.shard.add_(1.0)


@fault(
    bugs.COPIES_OF_THE_PREVIOUS_STEP, source="MG #3140; DS PR#7707", world=4,
    features=("two-axes", "several-steps"),
)  # fmt: skip
class LastReplicaMissesAStep(Zero1):
    """In the second step the ranks of the last replica do not publish what they updated."""

    second = False

    def train_step(self, step: Step) -> StepReport:
        self.second = step.index == self.case.training.first + 1
        return super().train_step(step)

    def _publish(self) -> None:
        group = self.replicas.group
        last = group is not None and group.rank() == group.size() - 1
        before = [bucket.full.clone() for bucket in self.buckets]
        super()._publish()
        if self.second and last:
            for bucket, old in zip(self.buckets, before, strict=True):
                shard = bucket.shard.clone()
                bucket.full.copy_(old)
                bucket.shard.copy_(shard)


@fault(
    bugs.NORM_TIMES_ROOT_R, source="PT #88621", world=4, features=("two-axes", "clip"),
    without=("clip-inf",),
)  # fmt: skip
class NormOverReplicas(Plantable, Zero2):
    """The squares of the norm are summed over all ranks: each replica counts."""

    def plant(self) -> None:
        self.optimizer.group = self.everyone


def _number(name: str) -> int:
    return int(os.environ[name])


@fault(bugs.SHARD_OF_THE_LOCAL_RANK, source="DS PR#7601", world=3, features=("hosts",))
class LocalRankForRank(Plantable, Zero3):
    """The local rank chooses the shard."""

    def plant(self) -> None:
        for flat in self.flats:
            flat.gather()
            flat.wait()
            flat.mine = flat.partition.shard(_number("LOCAL_RANK"))
            flat.pieces = flat.partition.pieces(_number("LOCAL_RANK"))
            flat.shard.copy_(flat.full[flat.mine])
            flat.release()
        owned = [one for wide in self.wide for one in wide.owned()]
        device = self.optimizer.device
        self.optimizer = ShardedOptimizer(self.case, owned, self.group, device)


@fault(bugs.DIVIDED_BY_THE_RANKS_OF_A_HOST, source="seen often", world=3, features=("hosts",))
class DividedByLocalWorldSize(Zero1InParts):
    """The sum over all ranks is divided by the number of ranks on the host."""

    def after_reduction(self, one: OwnedPiece) -> None:
        one.gradient.mul_(self.world_size).div_(_number("LOCAL_WORLD_SIZE"))


@fault(bugs.REDUCED_WITHIN_EACH_HOST, source="seen often", world=3, features=("hosts",))
class ReducedWithinHost(Plantable, Zero1):
    """Gradients are reduced over the ranks of each host, never between hosts."""

    def plant(self) -> None:
        hosts = [0] * self.world_size
        dist.all_gather_object(hosts, _number("GROUP_RANK"), group=self.group)
        here = [rank for rank, host in enumerate(hosts) if host == _number("GROUP_RANK")]
        self.within = dist.new_group(
            [dist.get_global_rank(self.group, rank) for rank in here],
            use_local_synchronization=True,
        )

    def _reduce(self) -> None:
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            dist.all_reduce(gradients, group=self.within)
            bucket.gradient.div_(self.within.size())
        self.reduced = True

    def close(self) -> None:
        dist.destroy_process_group(self.within)
        super().close()
