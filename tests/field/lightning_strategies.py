"""Strategies of Lightning as objects, and two with planted faults."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

ddp = DDPStrategy(find_unused_parameters=True, gradient_as_bucket_view=True)
parallel = ModelParallelStrategy()


def fsdp() -> FSDPStrategy:
    return FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", state_dict_type="sharded")


class Scaled(DDPStrategy):
    """Sums gradients over ranks, where it should take their mean."""

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        if self.model.require_backward_grad_sync:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.world_size)


class Forgetful(DDPStrategy):
    """Loads no state of the optimizer."""

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        pass


def scaled() -> DDPStrategy:
    return Scaled(find_unused_parameters=True)


def forgetful() -> DDPStrategy:
    return Forgetful(find_unused_parameters=True)
