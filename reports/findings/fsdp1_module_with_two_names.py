"""torch only: FSDP1 wraps a module that has two names under one of them only.

    python fsdp1_module_with_two_names.py

A layer is registered as `first` and as `second`, and called by both names. Wrapping layer by layer
replaces `first` only. With `NO_SHARD` and `use_orig_params=True` part of its gradient is lost.
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
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

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


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.first.weight, 3.0), nn.init.ones_(self.last.weight)
        self.second = self.first

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(inputs)))


def update(wrap: bool, rank: int) -> float:
    """What one step of SGD with a learning rate of 1 takes off the weight."""
    model = FullyShardedDataParallel(
        Twice(),
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}) if wrap else None,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.tensor([[rank + 1.0]])).sum().backward()
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        return 3.0 - next(model.parameters()).item()


def check(rank: int) -> bool:
    wrong = False
    for wrap in (False, True):
        expected, got = 9.0, update(wrap, rank)  # 2 x the weight x the mean of the inputs 1 and 2
        wrong = wrong or got != expected
        if rank == 0:
            label = "each layer" if wrap else "the whole"
            print(f"{label} wrapped: expected {expected}, got {got}", flush=True)
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
