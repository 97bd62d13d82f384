"""torch only: set_gradient_divide_factor on the model reaches the root unit only.

    python fsdp2_divide_factor_of_the_root_only.py

Two units, and a divide factor of 1 (sum, not mean) set on the whole model. The other setters of
`FSDPModule` reach all units below; this one and `set_force_sum_reduction_for_comms` reach the
parameters of the module itself, so part of the gradients is summed and part is averaged.
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
from torch.distributed.fsdp import FSDPModule, fully_shard

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
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    nn.init.ones_(model[0].weight), nn.init.ones_(model[1].weight)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo has no other sum
            module.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(1.0)
    model(torch.tensor([[rank + 1.0]])).sum().backward()
    wrong = False
    for name, parameter in model.named_parameters():
        expected, got = 3.0, parameter.grad.full_tensor().item()  # the inputs 1 and 2
        wrong = wrong or got != expected
        if rank == 0:
            print(f"{name}: expected {expected}, got {got}", flush=True)
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
