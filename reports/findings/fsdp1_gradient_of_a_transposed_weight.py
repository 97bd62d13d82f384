"""torch only: FSDP1 permutes the gradient of a weight that is not contiguous.

    python fsdp1_gradient_of_a_transposed_weight.py

A weight of shape (2, 3) is stored transposed, as weights tied across a transpose or in the memory
format `channels_last` are. With `NO_SHARD` and `use_orig_params=True` the optimizer is
given its gradient with the elements in the order of storage, cut into the wrong rows.
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


def update(strategy: ShardingStrategy, transposed: bool) -> list[list[float]]:
    """What one step of SGD with a learning rate of 1 takes off a weight of zeros."""
    model = nn.Linear(3, 2, bias=False)
    weight = torch.zeros(3, 2).t() if transposed else torch.zeros(2, 3)
    model.weight = nn.Parameter(weight)
    wrapped = FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), sharding_strategy=strategy, use_orig_params=True
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    outputs = wrapped(torch.tensor([[1.0, 2.0, 3.0]]))
    (outputs * torch.tensor([1.0, 10.0])).sum().backward()
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(wrapped):
        return model.weight.neg().tolist()


def check(rank: int) -> bool:
    expected = [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]
    wrong = False
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        for transposed in (False, True):
            got = update(strategy, transposed)
            wrong = wrong or got != expected
            if rank == 0:
                label = f"{strategy.name}, {'transposed' if transposed else 'contiguous'}"
                print(f"{label}: expected {expected}, got {got}", flush=True)
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
