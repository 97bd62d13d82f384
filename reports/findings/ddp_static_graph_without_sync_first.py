"""torch only: DDP with a static graph refuses a first microbatch without synchronisation.

    python ddp_static_graph_without_sync_first.py

Two microbatches accumulate under `no_sync`, as the documentation of DDP shows it. With
`static_graph=True` the first backward of the run raises an internal assertion.
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


def accumulate(**options: bool) -> str:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), **options)
    try:
        with model.no_sync():
            model(torch.ones(1, 1)).sum().backward()
        model(torch.ones(1, 1)).sum().backward()
    except RuntimeError as error:
        return str(error).split(" at ")[0]
    return f"gradient {model.module.weight.grad.item()}"


def check(rank: int) -> bool:
    wrong = False
    for options in ({}, {"static_graph": True}):
        expected, got = "gradient 2.0", accumulate(**options)
        wrong = wrong or got != expected
        if rank == 0:
            print(f"{options}: expected {expected}, got {got}", flush=True)
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
