"""Faults of a mesh of two axes: sums, divisions and groups of the wrong axis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.textbook.reduction import Replicas
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..contract import Built, Step, StepReport


class NotOverReplicas(Zero3):
    """Gradients are reduced over the shard axis, never over the replicate axis.

    Flagged: gradient, since each replica has a gradient of its own.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.replicas.count = 1


class NotOverReplicasWithAccumulation(Zero1):
    """With several microbatches the reduction over replicas is deferred and forgotten.

    Flagged: gradient.
    """

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


class LastMicrobatchOverReplicas(Zero2):
    """Gradients reduced over shards before the last microbatch are left out of the all-reduce.

    Flagged: gradient.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.replicas: _LastOnly = _LastOnly(mesh)
        self._done = 0

    def _end_microbatch(self) -> None:
        super()._end_microbatch()
        self._done += 1
        if self._done % self.case.training.microbatches == self.case.training.microbatches - 1:
            self.replicas.set_aside([gradient.shard for gradient in self.gradients])


class DividedByShardsOnly(Fsdp2):
    """The divide factor is the size of the shard axis, as without replicas.

    torch then sums over the replicate axis. Flagged: gradient, R times too large.
    """

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        built = super().build(model, case, mesh)
        for module in built.model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(case.axes.size("shard")))
        return built


class DividedByReplicasTwice(Zero3):
    """The sum over the shards is divided by the number of all ranks, then averaged over replicas.

    Flagged: gradient, R times too small.
    """

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


class AxesExchanged(Zero1):
    """The replicate axis of the mesh is taken for the shard axis, and the other way round.

    Flagged: ownership.
    """

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


class CutOverAllRanks(Zero2):
    """The replicate axis is ignored: one copy is sharded over all ranks.

    Flagged: ownership.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        given: Any = _AllRanks(mesh)
        super().__init__(model, case, given)


class ReplicasStartApart(Zero3):
    """Initial weights are broadcast within each replica, not between replicas.

    Flagged: publish.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        if not self.replicas.first:
            for flat in self.flats:
                flat.shard.add_(1.0)


class NormOverReplicas(Zero2):
    """The squares of the norm are summed over all ranks: each replica counts.

    Flagged: clip, a norm sqrt(R) times too large.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.optimizer.group = self.everyone


class LastReplicaMissesAStep(Zero1):
    """In the second step the ranks of the last replica do not publish what they updated.

    Flagged: publish.
    """

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
                own = bucket.shard.clone()
                bucket.full.copy_(old)
                bucket.shard.copy_(own)
