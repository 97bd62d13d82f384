"""torch only: parameters_as_bucket_view after DDP permutes the gradient.

    python zero_redundancy_bucket_view_of_a_transposed_weight.py

A weight of shape (2, 3) is stored transposed. `ZeroRedundancyOptimizer` with
`parameters_as_bucket_view=True`, made after the model was given to DDP, changes its strides under
DDP's feet: the gradient comes back permuted, in the first step, or in each where DDP does not
rebuild its buckets (`find_unused_parameters=True`).
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
from torch.distributed.optim import ZeroRedundancyOptimizer
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


def check(rank: int) -> bool:
    expected = [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]
    wrong = False
    for find_unused in (False, True):
        model = nn.Linear(3, 2, bias=False)
        model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
        wrapped = DistributedDataParallel(model, find_unused_parameters=find_unused)
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3
        )
        for step in range(3):
            outputs = wrapped(torch.tensor([[1.0, 2.0, 3.0]]))
            (outputs * torch.tensor([1.0, 10.0])).sum().backward()
            got = model.weight.grad.tolist()
            wrong = wrong or got != expected
            if rank == 0:
                print(f"find_unused_parameters={find_unused}, step {step}: got {got}", flush=True)
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        print(f"expected everywhere {expected}", flush=True)
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
