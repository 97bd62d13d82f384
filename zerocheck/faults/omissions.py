"""Faults that silently leave something out of the reduction or the update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from msgspec import structs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.textbook.zero1 import Zero1
from ..case.schema import Case
from ..contract import Built, Step, StepReport, groups
from .fault import fault
from .parts import Plantable, with_callback


@fault(
    "gradient", bugs.LOCAL_GRADIENT_ONLY, source="PT #104336", world=3,
    without=("tied", "frozen", "sometimes-used"),
)  # fmt: skip
class HooksLostOnMove(Ddp):
    """A layer is moved after DDP was made, which gives it new parameters.

    DDP reduces the old ones.
    """

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        # What it lacks then counts as unused.
        sharding = structs.replace(case.sharding, find_unused=True, static_graph=False)
        built = super().build(model, structs.replace(case, sharding=sharding), mesh)
        layer: Any = model.get_submodule("stem")
        for name, parameter in list(layer.named_parameters(recurse=False)):
            layer.register_parameter(
                name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            )
        return replace(built, optimizer=torch.optim.AdamW(groups(built.model, case)))


@fault(
    "update", bugs.NEVER_UPDATED, source="MG 9a8420c90a", features=("bucket-small",),
    without=("frozen", "unused"),
)  # fmt: skip
class BucketsRecreated(Plantable, Zero1):
    """Only the last bucket is updated.

    The table of parameters to update is rebuilt for each bucket.
    """

    def plant(self) -> None:
        names = {name for name, _ in self.buckets[-1].partition.shapes}
        kept = {one.parameter for one in self.optimizer.owned if one.piece.name in names}
        for group in self.optimizer.optimizer.param_groups:
            group["params"] = [one for one in group["params"] if one in kept]


# A GRU runs another kernel where its parameters do not learn: its loss differs first.
@fault(
    "gradient", source="FS #780", features=("module-twice",),
    without=("frozen", "checkpoint", "block-recurrent"), attributed=r"of its use 2 of 2 .* it is 0",
)  # fmt: skip
class ReusedModuleOverwrites(Plantable, Zero1):
    """The gradient of one call of a reused module replaces that of the other."""

    def plant(self) -> None:
        self.called: set[nn.Module] = set()
        for block in self.model.get_submodule("blocks").children():
            block.register_forward_pre_hook(self._before)
            block.register_forward_hook(self._after)
        self.silent: list[nn.Parameter] = []

    def train_step(self, step: Step) -> StepReport:
        return super().train_step(with_callback(step, self.called.clear))

    def _before(self, block: nn.Module, _: Any) -> None:
        if block in self.called:
            self.silent = [one for one in block.parameters() if one.requires_grad]
            for parameter in self.silent:
                parameter.requires_grad_(False)
        self.called.add(block)

    def _after(self, *_: Any) -> None:
        for parameter in self.silent:
            parameter.requires_grad_(True)
        self.silent = []


@fault(
    "gradient", source="PT #124193", features=("sometimes-used", "microbatches"), microbatches=2,
    attributed=r"own gradient alone",
)  # fmt: skip
class LastTouchedOnly(Plantable, Zero1):
    """Only parameters used by the last microbatch are reduced.

    Gradients of earlier ones stay local.
    """

    def plant(self) -> None:
        self.before: dict[nn.Parameter, torch.Tensor] = {}

    def train_step(self, step: Step) -> StepReport:
        return super().train_step(with_callback(step, self._note))

    def _note(self) -> None:
        self.before = {
            one: one.grad.clone() for one in self.model.parameters() if one.grad is not None
        }

    def _reduce(self) -> None:
        local = [gradients.clone() for gradients in self.gradients]
        super()._reduce()
        for bucket, whole, mean in zip(self.buckets, local, self.gradients, strict=True):
            for parameter, mine, into in zip(
                bucket.parameters, bucket.views(whole), bucket.views(mean), strict=True
            ):
                if torch.equal(mine, self.before.get(parameter, mine)):
                    into.copy_(mine)


@fault(
    "gradient", source="MG #844", features=("tied",), without=("frozen",),
    attributed=r"of its use 1 of 2|own gradient alone",
)  # fmt: skip
class TiedBeforeSync(Plantable, Zero1):
    """A tied weight is reduced before its two gradients are added.

    The second one stays local.
    """

    def plant(self) -> None:
        self.weight = self.model.get_parameter("stem.weight")
        self.alias = nn.Parameter(self.weight.detach(), self.weight.requires_grad)

    def train_step(self, step: Step) -> StepReport:
        self.alias.grad = None
        stem = self.model.get_submodule("stem")
        before = stem.register_forward_pre_hook(lambda *_: self._use(self.alias))
        after = stem.register_forward_hook(lambda *_: self._use(self.weight))
        try:
            return super().train_step(step)
        finally:
            before.remove()
            after.remove()

    def _use(self, weight: nn.Parameter) -> None:
        self.model.get_submodule("stem")._parameters["weight"] = weight

    def _reduce(self) -> None:
        super()._reduce()
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            for parameter, mean in zip(bucket.parameters, bucket.views(gradients), strict=True):
                if parameter is self.weight and self.alias.grad is not None:
                    mean.add_(self.alias.grad, alpha=1 / self.world_size)
