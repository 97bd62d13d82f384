"""torch only: FSDP1 clips by the infinity norm of an earlier step.

    python fsdp1_inf_norm_of_an_earlier_step.py

Three ranks share a weight of two elements, so rank 2 holds nothing of it. The gradient shrinks by
a hundred from step to step; the norm that `FullyShardedDataParallel.clip_grad_norm_` reports, and
clips by, stays that of the first step.
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
from torch.distributed.fsdp import FullyShardedDataParallel

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

WORLD_SIZE = 3


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
    model = FullyShardedDataParallel(
        nn.Linear(2, 1, bias=False), device_id=torch.device("cpu"), use_orig_params=True
    )
    wrong = False
    for step, scale in enumerate((100.0, 1.0, 0.01)):
        model.zero_grad()
        (model(torch.tensor([[1.0, 2.0]])) * scale).sum().backward()
        expected = 2.0 * scale  # the same on every rank, so the mean is it too
        got = model.clip_grad_norm_(1e9, norm_type=float("inf")).item()
        wrong = wrong or abs(got - expected) > 1e-6 * expected
        if rank == 0:
            print(f"step {step}: expected norm {expected:g}, got {got:g}", flush=True)
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
