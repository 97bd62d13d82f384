"""torch only: FSDP1 with NO_SHARD never trains a frozen root unit that is unfrozen later.

    python fsdp1_frozen_root_unit.py

All parameters of the root unit are frozen for one step. After that step the model does not
list them as parameters any more, and to unfreeze them has no effect: no gradient, no error.
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


class Block(nn.Linear):
    """The one module with a unit of its own; the first layer belongs to the root unit."""


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
    model = nn.Sequential(nn.Linear(1, 1), Block(1, 1))
    model[0].requires_grad_(False)
    model = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.NO_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    parameters = dict(model.named_parameters())
    model(torch.ones(1, 1)).sum().backward()  # a step with the root unit frozen
    listed = dict(model.named_parameters())
    model.zero_grad()
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    model(torch.ones(1, 1)).sum().backward()
    without = [name for name, parameter in parameters.items() if parameter.grad is None]
    if rank == 0:
        print(f"torch {torch.__version__}")
        print(f"parameters listed before the first step {len(parameters)}, after it {len(listed)}")
        print(f"unfrozen and used, yet without a gradient: {len(without)}")
    return bool(without) or len(listed) < len(parameters)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
