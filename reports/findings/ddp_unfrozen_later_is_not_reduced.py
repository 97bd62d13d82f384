"""torch only: a parameter that is unfrozen after DDP was built is never reduced.

    python ddp_unfrozen_later_is_not_reduced.py

The weight is frozen when DDP is built and trainable from step 1 on. Its gradient is then that of
each rank alone: the replicas drift apart, and nothing is said.
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


def check(rank: int) -> bool:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    nn.init.ones_(model[0].weight), nn.init.ones_(model[1].weight)
    model[0].weight.requires_grad_(False)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    wrong = False
    for step in range(2):
        if step == 1:
            model[0].weight.requires_grad_(True)
        wrapped.zero_grad()
        wrapped(torch.tensor([[rank + 1.0]])).sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            expected, got = 1.5, parameter.grad.item()  # the mean over the inputs 1 and 2
            wrong = wrong or got != expected
            if rank == 0:
                print(f"step {step}, {name}: expected {expected}, got {got}", flush=True)
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
