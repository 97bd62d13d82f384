"""Faults planted under conditions in which the implementation has a known issue already."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerocheck.adapters.ddp.adapter import Ddp
from zerocheck.adapters.fsdp1.adapter import Fsdp1
from zerocheck.contract import Loader, Saving, StepReport
from zerocheck.contract.implementation import Step


class HalfTripled(Fsdp1):
    """The first half of each gradient is 3 times what was reduced."""

    def train_step(self, step: Step) -> StepReport:
        def reached(moment: Any) -> None:
            if moment == "reduced":
                with torch.no_grad():
                    for parameter in self.built.model.parameters():
                        if parameter.grad is not None:
                            gradient = parameter.grad.view(-1)
                            gradient[: len(gradient) // 2] *= 3
            step.reached(moment)

        return super().train_step(replace(step, reached=reached))


class DeletesTheOlder(Ddp):
    """A save that removes the older checkpoint before it writes the new one."""

    def save(self, directory: str, loader: Loader) -> Saving | None:
        if dist.get_rank() == 0:
            for path in Path(directory).glob("*"):
                path.unlink()
        dist.barrier()
        return super().save(directory, loader)
