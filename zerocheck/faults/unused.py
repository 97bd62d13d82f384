"""Faults with parameters that have no gradient, or no place in the buffers."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..case.schema import Case
from ..contract import Built
from ..errors import Unsupported
from ..implementations.ddp import Ddp
from ..implementations.textbook.zero1 import Zero1


class NoneBecomesZero(Ddp):
    """A gradient that is None becomes zeros, so AdamW moves and decays (FS #605).

    Flagged: none became zero.
    """

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        built = super().build(model, case, mesh)
        built.optimizer.zero_grad = lambda set_to_none=True: _zero(model)  # type: ignore[method-assign]
        return built


def _zero(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


class OutsideFlatBuffer(Zero1):
    """The head is in no bucket: neither reduced nor updated (MG #565).

    Flagged: gradient missing.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        head = [p for p in model.get_submodule("head").parameters() if p.requires_grad]
        if case.model.tied or len(head) == sum(p.requires_grad for p in model.parameters()):
            raise Unsupported("nothing is left in the buffer")
        for parameter in head:
            parameter.requires_grad_(False)
        super().__init__(model, case, mesh)
        for parameter in head:
            parameter.requires_grad_(True)
