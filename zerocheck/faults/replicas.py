"""Faults of a mesh of two axes: sums, divisions and groups of the wrong axis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from .. import causes as bugs
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.textbook.reduction import Replicas
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..contract import Built, Step, StepReport
from .fault import fault


@fault(
    "zero3", "gradient", bugs.NOT_REDUCED_OVER_REPLICAS, source="PT #154888; verl #7493", world=4,
    features=("two-axes",),
)  # fmt: skip
class NotOverReplicas(Zero3):
    """Gradients are reduced over the shard axis, never over the replicate axis."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.replicas.count = 1


@fault(
    "zero1", "gradient", bugs.NOT_REDUCED_OVER_REPLICAS, source="seen in review", world=4,
    microbatches=2, features=("two-axes",),
)  # fmt: skip
class NotOverReplicasWithAccumulation(Zero1):
    """With several microbatches the reduction over replicas is deferred and forgotten."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        if case.training.microbatches > 1:
            self.replicas.count = 1


class _LastOnly(Replicas):
    """Average over replicas without the gradients before `set_aside`, which are added again."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.aside: list[torch.Tensor] = []

    def set_aside(self, shards: list[torch.Tensor]) -> None:
        self.aside = [shard.clone() for shard in shards]
        for shard in shards:
            shard.zero_()

    def average(self, shards: Iterable[torch.Tensor]) -> None:
        shards = list(shards)
        super().average(shards)
        for shard, before in zip(shards, self.aside, strict=False):
            shard.add_(before)
        self.aside = []


@fault(
    "zero2", "gradient", bugs.LAST_MICROBATCH_ONLY_OVER_REPLICAS, source="PT #125484", world=4,
    microbatches=3, features=("two-axes",),
)  # fmt: skip
class LastMicrobatchOverReplicas(Zero2):
    """Gradients reduced over shards before the last microbatch are left out of the all-reduce."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.replicas: _LastOnly = _LastOnly(mesh)
        self._done = 0

    def _end_microbatch(self) -> None:
        super()._end_microbatch()
        self._done += 1
        if self._done % self.case.training.microbatches == self.case.training.microbatches - 1:
            self.replicas.set_aside([gradient.shard for gradient in self.gradients])


@fault(
    "fsdp2", "gradient", bugs.GRADIENT_TIMES_R, source="PT #155903", world=4, features=("two-axes",)
)
class DividedByShardsOnly(Fsdp2):
    """The divide factor is the size of the shard axis, as without replicas.

    torch then sums over the replicate axis.
    """

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        built = super().build(model, case, mesh)
        for module in built.model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(case.axes.size("shard")))
        return built


@fault(
    "zero3", "gradient", bugs.GRADIENT_OVER_R, source="seen often", world=4, features=("two-axes",)
)
class DividedByReplicasTwice(Zero3):
    """The sum over shards is divided by the number of all ranks, then averaged over replicas."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.reduction.world_size = case.world_size


class _Exchanged:
    """Mesh whose groups of the axes replicate and shard are exchanged."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh_dim_names, self.device_type = mesh.mesh_dim_names, mesh.device_type
        self._mesh = mesh

    def get_group(self, axis: str) -> dist.ProcessGroup:
        return self._mesh.get_group("shard" if axis == "replicate" else "replicate")


@fault(
    "zero1", "ownership", bugs.CUT_OVER_THE_REPLICATE_AXIS, source="seen in review", world=4,
    features=("two-axes",),
)  # fmt: skip
class AxesExchanged(Zero1):
    """The first axis of the mesh is taken for the shard axis, and the second for the replicas."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        given: Any = _Exchanged(mesh)
        super().__init__(model, case, given)


class _AllRanks:
    """Mesh with all ranks on one axis."""

    mesh_dim_names = ("shard",)

    def __init__(self, mesh: DeviceMesh) -> None:
        self.device_type = mesh.device_type

    def get_group(self, axis: str) -> dist.ProcessGroup | None:
        return dist.group.WORLD


@fault(
    "zero2", "ownership", bugs.CUT_OVER_ALL_RANKS, source="FS #907", world=4, features=("two-axes",)
)
class CutOverAllRanks(Zero2):
    """The replicate axis is ignored: one copy is sharded over all ranks."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        given: Any = _AllRanks(mesh)
        super().__init__(model, case, given)


@fault(
    "zero3", "publish", bugs.COPIES_DIFFER, source="PT #90465", world=4, features=("two-axes",),
    without=("mid-training",),
)  # fmt: skip
class ReplicasStartApart(Zero3):
    """Initial weights are broadcast within each replica, not between replicas."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        if not self.replicas.first:
            for flat in self.flats:
                flat.shard.add_(1.0)


@fault(
    "zero1", "publish", bugs.COPIES_OF_THE_PREVIOUS_STEP, source="MG #3140; DS PR#7707", world=4,
    features=("two-axes", "several-steps"),
)  # fmt: skip
class LastReplicaMissesAStep(Zero1):
    """In the second step the ranks of the last replica do not publish what they updated."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self._second = False

    def train_step(self, step: Step) -> StepReport:
        self._second = step.index == self.case.training.first + 1
        return super().train_step(step)

    def _publish(self) -> None:
        group = self.replicas.group
        last = group is not None and group.rank() == group.size() - 1
        before = [bucket.full.clone() for bucket in self.buckets]
        super()._publish()
        if self._second and last:
            for bucket, old in zip(self.buckets, before, strict=True):
                shard = bucket.shard.clone()
                bucket.full.copy_(old)
                bucket.shard.copy_(shard)


@fault(
    "zero2", "clip", bugs.NORM_TIMES_ROOT_R, source="PT #88621", world=4,
    features=("two-axes", "clip"), without=("clip-inf",),
)  # fmt: skip
class NormOverReplicas(Zero2):
    """The squares of the norm are summed over all ranks: each replica counts."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.optimizer.group = self.everyone
