"""torch only: FSDP1 with NO_SHARD forgets gradients of what was unfrozen, under no_sync.

    python fsdp1_unfrozen_under_no_sync.py

A frozen weight is unfrozen after a step. Both steps accumulate two microbatches, the
first of them under no_sync. Then only the last one counts for the unfrozen weight.
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
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

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
    for layer in model:
        nn.init.ones_(layer.weight)
    model[0].weight.requires_grad_(False)
    first = model[0]
    model = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.NO_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    with model.no_sync():
        model(torch.ones(1, 1)).sum().backward()  # a step with the first weight frozen
    model(torch.ones(1, 1)).sum().backward()
    model.zero_grad()
    first.weight.requires_grad_(True)
    with model.no_sync():
        model(torch.full((1, 1), 10.0)).sum().backward()
    model(torch.full((1, 1), 1.0)).sum().backward()
    expected, got = 11.0, first.weight.grad.item()  # the same on every rank
    if rank == 0:
        print(f"torch {torch.__version__}")
        print(f"gradient after microbatches of 10 and 1: expected {expected:g}, got {got:g}")
    return got != expected


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
