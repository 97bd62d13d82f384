"""Faults with parameters that have no gradient, or no place in the buffers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.ddp.adapter import Ddp
from ..adapters.fsdp2.adapter import Fsdp2, reduce_unused
from ..adapters.textbook.reduction import Reduction
from ..adapters.textbook.unit import Unit
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..contract import Built
from ..errors import Unsupported
from .fault import fault


@fault("ddp", "gradient", bugs.NONE_BECAME_ZERO, source="FS #605", features=("unused",))
class NoneBecomesZero(Ddp):
    """A gradient that is None becomes zeros, so AdamW moves and decays."""

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        built = super().build(model, case, mesh)
        built.optimizer.zero_grad = lambda set_to_none=True: _zero(model)
        return built


def _zero(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


@fault("zero1", "gradient", bugs.GRADIENT_MISSING, source="MG #565")
class OutsideFlatBuffer(Zero1):
    """The head is in no bucket: neither reduced nor updated."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        head = [p for p in model.get_submodule("head").parameters() if p.requires_grad]
        if case.model.tied or len(head) == sum(p.requires_grad for p in model.parameters()):
            raise Unsupported("nothing is left in the buffer")
        for parameter in head:
            parameter.requires_grad_(False)
        super().__init__(model, case, mesh)
        for parameter in head:
            parameter.requires_grad_(True)


class _EndedByNone(Unit):
    def reduce(self, reduction: Reduction) -> None:
        for flat in self.flats:
            missing = False
            for parameter in flat.parameters:
                missing = missing or parameter.grad is None
                if missing:
                    parameter.grad = None
        super().reduce(reduction)


@fault(
    "zero3", "gradient", bugs.LEFT_OUT_AFTER_AN_UNUSED_ONE, source="seen in review",
    features=("block-experts",),
)  # fmt: skip
class NoneEndsUnit(Zero3):
    """The first parameter without a gradient ends the collection of its unit.

    Those after it count as 0 on this rank.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        for unit in (*self.units, self.root):
            unit.__class__ = _EndedByNone


@fault(
    "zero1", "gradient", bugs.AVERAGED_OVER_USERS, source="DS #5618, #6545",
    features=("sometimes-used",), world=3,
)  # fmt: skip
class AveragedOverUsers(Zero1):
    """A gradient is averaged over the ranks that used the parameter, not over all."""

    def _reduce(self) -> None:
        used = [
            torch.stack([view.any() for view in bucket.views(gradients)]).float()
            for bucket, gradients in zip(self.buckets, self.gradients, strict=True)
        ]
        super()._reduce()
        for bucket, gradients, users in zip(self.buckets, self.gradients, used, strict=True):
            dist.all_reduce(users, group=self.group)
            for view, count in zip(bucket.views(gradients), users.tolist(), strict=True):
                view.mul_(self.world_size / max(count, 1.0))


@fault(
    "fsdp2", None, bugs.DIFFERENT_COLLECTIVES, source="PT #158719; torchtitan #2747",
    features=("side",), without=("block-experts", "frozen"), microbatches=1,
)  # fmt: skip
class UnusedNotReduced(Fsdp2):
    """FSDP2 by default: each rank reduce-scatters only the gradients that it has."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)  # which refuses a model that is so when it is built
        reduce_unused(self.built.model, enable=False)
