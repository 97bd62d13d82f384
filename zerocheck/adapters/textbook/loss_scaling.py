"""Dynamic loss scaling for sharded gradients, and what a backward starts from.

Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740), section 3.2: losses are
multiplied by a scale, so that small gradients do not underflow. If a gradient overflows, the step
is skipped and the scale is halved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from ...case.schema import Case
from ...contract import Microbatch


class LossScaler:
    """Dynamic loss scale, a power of two that is the same on all ranks; 1.0 without scaling.

    Each rank sees its own shard only, so whether there was an overflow is agreed upon: without
    that some ranks skip the step and others do not.
    """

    growth_interval = 2000
    """Steps without overflow after which the scale is doubled, as in torch.amp.GradScaler."""

    def __init__(self, case: Case, group: dist.ProcessGroup, device: str = "cpu") -> None:
        self.group = group
        self.device = device
        self.enabled = case.training.loss_scale is not None
        self.scale = case.training.loss_scale or 1.0
        self.overflow = False
        self._good_steps = 0

    def objective(self, loss: torch.Tensor, microbatch: Microbatch, count: int) -> torch.Tensor:
        """Return the scaled share of a microbatch's loss, to call backward on."""
        if microbatch.weight != 1.0:
            loss = loss * microbatch.weight
        loss = loss / count
        return loss * self.scale if self.enabled else loss

    def unscale(self, gradients: Iterable[torch.Tensor]) -> None:
        """Divide reduced gradients by the scale, in place. Notes whether any rank overflowed."""
        if not self.enabled:
            return
        gradients = list(gradients)
        self.overflow = self.agreed(not all(map(_finite, gradients)))
        self.divide(gradients)

    def divide(self, gradients: Iterable[torch.Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        for gradient in gradients:
            gradient.mul_(1.0 / self.scale)

    def state_dict(self) -> dict[str, float] | None:
        """Return the state to put in a checkpoint, or None if the case does not scale."""
        return {"scale": self.scale, "good_steps": self._good_steps} if self.enabled else None

    def load_state_dict(self, state: Mapping[str, float] | None) -> None:
        """Load a checkpoint's scale; keep this one if either training does not scale."""
        if self.enabled and state is not None:
            self.scale = state["scale"]
            self._good_steps = int(state["good_steps"])

    def agreed(self, overflow: bool) -> bool:
        """Return True if any rank passes True."""
        found = torch.full((), float(overflow), device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return bool(found)

    def update(self) -> None:
        """Update the scale after a step: halve it on overflow, double it after a good run."""
        if not self.enabled:
            return
        self._good_steps = 0 if self.overflow else self._good_steps + 1
        if self.overflow:
            self.scale /= 2
        elif self._good_steps % self.growth_interval == 0:
            self.scale *= 2


def _finite(gradient: torch.Tensor) -> bool:
    """Return True if all elements are; found by the largest magnitude, which needs no memory."""
    if not gradient.numel():
        return True
    return math.isfinite(float(torch.linalg.vector_norm(gradient, math.inf)))
