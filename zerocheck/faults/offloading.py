"""Faults of CPU offload: copies between the CPU and the device that come too late, or too early.

On a machine without an accelerator torch copies nothing, so each shows what such a copy would hold.
They are there with `sharding.offload` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from .. import causes as bugs
from ..adapters.fsdp2.adapter import Fsdp2
from ..contract import Step, StepReport
from ..contract.implementation import Moment
from .fault import fault


class _Offloaded(Fsdp2):
    """Base of the faults of offloading."""

    @property
    def offloads(self) -> bool:
        """True if the case offloads."""
        return self.case.sharding.offload != "none"

    def learning(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Iterate over the trainable parameters."""
        return ((n, p) for n, p in self.built.model.named_parameters() if p.requires_grad)


@fault(
    "update", bugs.GRADIENT_OF_THE_PREVIOUS_STEP, source="comment in FSDP2's foreach_reduce",
    features=("offload", "several-steps"),
)  # fmt: skip
class StaleHostGradient(_Offloaded):
    """AdamW does not wait for the copy to the CPU, and uses the previous step's gradient."""

    def train_step(self, step: Step) -> StepReport:
        if not self.offloads:
            return super().train_step(step)
        before: dict[str, torch.Tensor] = self.__dict__.setdefault("_copied", {})
        with self._instead(before):
            return super().train_step(step)

    @contextmanager
    def _instead(self, before: dict[str, torch.Tensor]) -> Iterator[None]:
        arrived: dict[str, torch.Tensor] = {}

        def late(*_: Any) -> None:
            for name, parameter in self.learning():
                if parameter.grad is not None:
                    gradient = _shard(parameter.grad)
                    arrived[name] = gradient.clone()
                    if name in before:
                        gradient.copy_(before[name])

        handle = self.built.optimizer.register_step_pre_hook(late)
        try:
            yield
        finally:
            handle.remove()
            before.update(arrived)


@fault(
    "publish", bugs.PARAMETERS_OF_THE_PREVIOUS_STEP, source="seen in review",
    features=("offload", "several-steps"),
)  # fmt: skip
class CopiedBackBeforeUpdate(_Offloaded):
    """Units are copied to the device before AdamW has updated them on the CPU."""

    def train_step(self, step: Step) -> StepReport:
        if not self.offloads:
            return super().train_step(step)
        sent: dict[str, torch.Tensor] = self.__dict__.setdefault("_sent", {})
        updated = {name: _shard(parameter).clone() for name, parameter in self.learning()}
        self._write(sent)

        def reached(moment: Moment) -> None:
            self._write(updated)
            step.reached(moment)

        report = super().train_step(replace(step, reached=reached))
        sent.clear()
        sent.update(updated)
        return report

    def _write(self, held: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.learning():
            if name in held:
                _shard(parameter).copy_(held[name])


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    return cast(DTensor, tensor).to_local().detach()
