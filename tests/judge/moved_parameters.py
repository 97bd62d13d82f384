"""FSDP2 as cuDNN makes it on a GPU: the parameters of a recurrent module are moved."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zerocheck.adapters.fsdp2.adapter import Fsdp2
from zerocheck.contract import Step, StepReport


class Moved(Fsdp2):
    """At its first forward the gathered parameters get memory that no gather writes to."""

    watched = False

    def train_step(self, step: Step) -> StepReport:
        if not self.watched:
            self.watched = True
            for module in self.built.model.modules():
                if isinstance(module, nn.RNNBase):
                    module.register_forward_pre_hook(_move)
        return super().train_step(step)


def _move(module: Any, _: tuple[torch.Tensor, ...]) -> None:
    if getattr(module, "moved", False):
        return
    module.moved = True
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.clone()
