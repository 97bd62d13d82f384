"""torch and accelerate only: FSDP2 with activation checkpointing draws other dropout masks.

    python accelerate_dropout_in_a_checkpoint.py

The loss is linear in the weights, which are all 1, so the gradient adds up to the loss. It does
not where the backward computes the block again with another mask. accelerate ignores FSDP on the
CPU, so its state is told that it is on a GPU.
"""

import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5) * self.weight


def ratio(checkpointing: bool) -> float:
    """Sum of the gradient over the loss; right is 1."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        activation_checkpointing=checkpointing,
    )
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = nn.Sequential(Block())
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    loss = model(torch.arange(1.0, 65.0)).sum()
    accelerator.backward(loss)
    (weight,) = model.parameters()
    assert weight.grad is not None
    return float(weight.grad.to_local().sum() / loss)


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    plain, checkpointed = ratio(False), ratio(True)
    print(f"sum of the gradient over the loss, right is 1: {plain:.3f} without", end=" ")
    print(f"checkpointing, {checkpointed:.3f} with it", flush=True)
    dist.destroy_process_group()
    assert abs(plain - 1.0) < 1e-3
    sys.exit(1 if abs(checkpointed - 1.0) > 1e-3 else 0)
