"""torch and accelerate only: FSDP2 with cpu_ram_efficient_loading fails at a buffer.

    python accelerate_buffers_from_rank_0.py

The model has a batch norm. accelerate takes each tensor of its state dict for a sharded one.
accelerate ignores FSDP on the CPU, so its state is told that it is on a GPU.
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


def error_of(model: nn.Module) -> str:
    """What accelerate raises when it prepares the model; "" for nothing."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    try:
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    except AttributeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plain = error_of(nn.Sequential(nn.Linear(4, 4)))
    found = error_of(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    print(f"a layer: {plain or 'prepared'}; with a batch norm: {found or 'prepared'}", flush=True)
    dist.destroy_process_group()
    assert not plain
    sys.exit(1 if found else 0)
