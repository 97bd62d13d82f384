"""Faults of options of torch's wrappers: compiled models, tensor parallelism, CPU offload.

Bounds of a compiled model are estimated, and must still detect them. On a machine without an
accelerator torch copies nothing where it offloads, so each shows what such a copy would hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.shared.compiling import compiles
from ..case.schema import Case
from ..case.tensor_parallel import plan_of
from ..contract import Built, Step, StepReport
from ..contract.shard import Index
from .fault import fault
from .parts import Plantable, when_reduced


@fault(bugs.GRADIENT_TIMES_W, source="HF transformers #45994", world=3, features=("compile",))
class CompiledLossTimesWorld(Fsdp2):
    """The loss is multiplied by W where the model is compiled."""

    def _objective(self, loss: torch.Tensor, weight: float, count: int) -> torch.Tensor:
        objective = super()._objective(loss, weight, count)
        return objective * self.case.world_size if compiles(self.case) else objective


@fault(
    bugs.LOCAL_GRADIENT_ONLY, source="seen in review", world=3, features=("compile",),
    without=("bucket-small", "static-graph", "block-batch-norm"),
)  # fmt: skip
class CompiledUnreduced(Ddp):
    """The backward that was compiled never reduces."""

    def train_step(self, step: Step) -> StepReport:
        model: Any = self.built.model
        with model.no_sync() if compiles(self.case) else nullcontext():
            return super().train_step(step)


def _is_sharded(parameter: torch.Tensor) -> bool:
    """Return True if the ranks of the tp axis hold different parts of the parameter."""
    return (
        isinstance(parameter, DTensor)
        and "tp" in (parameter.device_mesh.mesh_dim_names or ())
        and not parameter.placements[-1].is_replicate()
    )


@fault(
    bugs.GRADIENT_TIMES_AXIS(axis="tp"), source="seen often", world=4, features=("tensor-parallel",)
)
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


@fault(
    bugs.GRADIENT_OVER_AXIS(axis="tp"), source="seen often", world=4, features=("tensor-parallel",)
)
class DividedByAllRanks(Fsdp2):
    """The mean is taken over all ranks, not over the data-parallel ones.

    Each loss is divided by the tp axis too.
    """

    def _objective(self, loss: torch.Tensor, weight: float, count: int) -> torch.Tensor:
        return super()._objective(loss, weight, count) / self.case.axes.size("tp")


class _Offloaded(Plantable, Fsdp2):
    """Base of the faults of offloading."""

    @property
    def offloads(self) -> bool:
        """True if the case offloads."""
        return self.case.sharding.offload != "none"

    def learning(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Iterate over the trainable parameters."""
        return ((n, p) for n, p in self.built.model.named_parameters() if p.requires_grad)


@fault(
    bugs.GRADIENT_OF_THE_PREVIOUS_STEP, obligation="update",
    source="comment in FSDP2's foreach_reduce", features=("offload", "several-steps"),
)  # fmt: skip
class StaleHostGradient(_Offloaded):
    """AdamW does not wait for the copy to the CPU, and uses the previous step's gradient."""

    def plant(self) -> None:
        self.before: dict[str, torch.Tensor] = {}
        if self.offloads:
            self.built.optimizer.register_step_pre_hook(self.exchange)

    def exchange(self, *_: Any) -> None:
        """Replace each gradient by that of the previous step."""
        for name, parameter in self.learning():
            if parameter.grad is not None:
                gradient = _shard(parameter.grad)
                arrived = gradient.clone()
                gradient.copy_(self.before.get(name, arrived))
                self.before[name] = arrived


@fault(
    bugs.PARAMETERS_OF_THE_PREVIOUS_STEP, source="seen in review",
    features=("offload", "several-steps"),
)  # fmt: skip
class CopiedBackBeforeUpdate(_Offloaded):
    """Units are copied to the device before AdamW has updated them on the CPU."""

    sent: Mapping[str, torch.Tensor] = {}

    def train_step(self, step: Step) -> StepReport:
        if not self.offloads:
            return super().train_step(step)
        updated = {name: _shard(parameter).clone() for name, parameter in self.learning()}
        self._write(self.sent)
        self.sent = updated
        return super().train_step(when_reduced(step, partial(self._write, updated)))

    def _write(self, shards: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.learning():
            if name in shards:
                _shard(parameter).copy_(shards[name])


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    return cast(DTensor, tensor).to_local().detach()
