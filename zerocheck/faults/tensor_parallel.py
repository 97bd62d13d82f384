"""Faults of tensor parallelism: one axis of the mesh taken for the other, or for none."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .. import causes as bugs
from ..adapters.fsdp2.adapter import Fsdp2
from ..case.schema import Case
from ..case.tensor_parallel import plan_of
from ..contract import Built, Step, StepReport
from ..contract.shard import Index
from .fault import fault
from .parts import when_reduced


def _is_sharded(parameter: torch.Tensor) -> bool:
    """Return True if the ranks of the tp axis hold different parts of the parameter."""
    return (
        isinstance(parameter, DTensor)
        and "tp" in (parameter.device_mesh.mesh_dim_names or ())
        and not parameter.placements[-1].is_replicate()
    )


@fault(bugs.GRADIENT_TIMES_T, source="seen often", world=4, features=("tensor-parallel",))
class ReplicatedSummedOverTp(Fsdp2):
    """Gradients of replicated parameters are summed over the tp axis.

    As if these ranks read samples of their own.
    """

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        self._tp = mesh.get_group("tp") if case.axes.has("tp") else None
        return super().build(model, case, mesh)

    def train_step(self, step: Step) -> StepReport:
        return super().train_step(when_reduced(step, self.sum_over_tp))

    def sum_over_tp(self) -> None:
        """Sum the gradients of replicated parameters over the tp axis."""
        for parameter in self.built.model.parameters() if self._tp is not None else ():
            grad: Any = parameter.grad
            if grad is not None and not _is_sharded(parameter):
                dist.all_reduce(grad.to_local(), group=self._tp)


@fault(
    bugs.PIECES_IN_THE_ORDER_OF_A_PLAIN_SHARD, source="PT #129206", world=4,
    features=("tensor-parallel-strided",),
)  # fmt: skip
class StridedTakenForPlain(Fsdp2):
    """A parameter that is sharded over tp first is read as if sharded over the shard axis first."""

    def _place(self, name: str, parameter: torch.Tensor) -> tuple[tuple[int, ...], Index | None]:
        shape, index = super()._place(name, parameter)
        if not _is_sharded(parameter) or not isinstance(parameter, DTensor):
            return shape, index
        mesh, last = parameter.device_mesh, parameter.placements[-1]
        if not (isinstance(last, Shard) and last.dim == 0) or shape[0] % mesh.size():
            return shape, index
        rows = shape[0] // mesh.size()
        first, second = mesh.get_local_rank("shard"), mesh.get_local_rank("tp")
        start = (first * mesh["tp"].size() + second) * rows
        return shape, (slice(start, start + rows), *(slice(0, size) for size in shape[1:]))


@fault(
    bugs.BIAS_OF_EACH_TENSOR_PARALLEL_RANK, source="seen often", world=2,
    features=("tensor-parallel",),
)  # fmt: skip
class BiasOnEveryRank(Fsdp2):
    """Each rank of the tp axis adds the whole bias of a row-wise layer to its partial sum."""

    def shard_layers(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().shard_layers(model, case, mesh)
        count = mesh["tp"].size()
        plan = plan_of(case.model, count)
        for path, style in plan.items():
            layer: Any = model.get_submodule(path)
            if style in ("row", "split") and layer.bias is not None:
                layer.register_forward_hook(
                    lambda layer, _, made: made + (count - 1) * layer.bias.to_local()
                )


@fault(bugs.GRADIENT_OVER_T, source="seen often", world=4, features=("tensor-parallel",))
class DividedByAllRanks(Fsdp2):
    """The mean is taken over all ranks, not over the data-parallel ones.

    Each loss is divided by the tp axis too.
    """

    def _objective(self, loss: torch.Tensor, weight: float, count: int) -> torch.Tensor:
        return super()._objective(loss, weight, count) / self.case.axes.size("tp")
