"""torch only: a transposed parameter gets a wrong first gradient.

    python zero_redundancy_transposed_bucket_view.py

ZeroRedundancyOptimizer with parameters_as_bucket_view is made after DDP, as its documentation
shows it. All ranks have the same batch, so the gradient should be that of one device.
"""

import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

WORLD_SIZE = 2


def run(rank: int, rendezvous: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=10),
    )
    torch.manual_seed(0)
    layer = nn.Linear(3, 2, bias=False)
    layer.weight = nn.Parameter(torch.randn(3, 2).t())  # strides (1, 2)
    inputs = torch.randn(4, 3)
    expected = torch.autograd.grad(layer(inputs).square().sum(), layer.weight)[0]
    model = DistributedDataParallel(layer)
    ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, parameters_as_bucket_view=True
    )
    for step in range(3):
        model.zero_grad()
        model(inputs).square().sum().backward()
        error = (layer.weight.grad - expected).abs().max()
        if rank == 0:
            print(f"step {step}: the gradient is off by {error:.6f}", flush=True)
        if error > 1e-5:
            open(f"{rendezvous}-wrong", "w").close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(f"{folder}/rendezvous",), nprocs=WORLD_SIZE)
        sys.exit(1 if os.path.exists(f"{folder}/rendezvous-wrong") else 0)
