"""torch only: SequenceParallel makes frozen parameters of a norm trainable.

    python sequence_parallel_unfreezes.py

Exits 1 while the fault is there, and 0 when it is gone.
"""

import os
import sys

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
wrong = False
for module, style in (
    (nn.LayerNorm(4), SequenceParallel()),
    (nn.Linear(4, 4), ColwiseParallel()),
    (nn.Linear(4, 4), RowwiseParallel()),
):
    module.requires_grad_(False)
    parallelize_module(module, mesh, style)
    got = [parameter.requires_grad for parameter in module.parameters()]
    expected = [False, False]
    wrong = wrong or got != expected
    print(f"{type(style).__name__}: expected requires_grad {expected}, got {got}", flush=True)
dist.destroy_process_group()
sys.exit(1 if wrong else 0)
