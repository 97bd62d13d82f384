"""torch only: on one rank FSDP2 divides the gradient twice by its divide factor.

    python fsdp2_divide_factor_twice_on_one_rank.py

`set_gradient_divide_factor(4)` on a world of one rank, with `set_force_sum_reduction_for_comms`
(or in fp16, where torch takes the same path): the gradient comes back divided by 16.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

WORLD_SIZE = 1


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
    wrong = False
    for force_sum in (False, True):
        model = nn.Linear(1, 1, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
        model.set_gradient_divide_factor(4.0)
        model.set_force_sum_reduction_for_comms(force_sum)
        model(torch.tensor([[16.0]])).sum().backward()
        expected, got = 4.0, model.weight.grad.full_tensor().item()
        wrong = wrong or got != expected
        print(f"sums only: {force_sum}: expected gradient {expected}, got {got}", flush=True)
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
