"""Faults of CPU offload: copies between the CPU and the device that come too late, or too early.

On a machine without an accelerator torch copies nothing, so each shows what such a copy would hold.
They are there with `sharding.offload` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from .. import causes as bugs
from ..adapters.fsdp2.adapter import Fsdp2
from ..contract import Step, StepReport
from .fault import fault
from .parts import Plantable, when_reduced


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
