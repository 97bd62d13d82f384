"""torch only: under Join the shards of a rank that is out of inputs are not updated.

    python zero_redundancy_join_skips_shards.py

Rank 0 has one input, rank 1 has two. In the second step rank 0 has joined: its gradients stay None
(or those of its last step), so the parameters that it owns miss the gradient of rank 1.
Exits 1 while the fault is there, and 0 when it is gone.
"""

import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

WORLD_SIZE = 2


def run(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=10),
    )
    wrong = check(rank)
    if rank == 0 and wrong:
        open(f"{folder}/wrong", "w").close()
    dist.destroy_process_group()


def train(rank: int) -> list[float]:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    nn.init.ones_(model[0].weight), nn.init.ones_(model[1].weight)
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1)
    with Join([wrapped, optimizer]):
        for _ in range(1 + rank):
            optimizer.zero_grad()
            wrapped(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.item() for parameter in model.parameters()]


def check(rank: int) -> bool:
    # The gradient of each weight is the other one; that of step 1 is divided by the world size.
    first = 1.0 - 0.1 * 1.0
    second = first - 0.1 * first / WORLD_SIZE
    got = train(rank)
    if rank == 0:
        print(f"expected weights {[round(second, 6)] * 2}", flush=True)
        print(f"got weights      {[round(value, 6) for value in got]}", flush=True)
    return any(abs(value - second) > 1e-6 for value in got)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
