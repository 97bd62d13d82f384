"""torch only: FSDP1 with SHARD_GRAD_OP keeps a frozen unit gathered between steps.

    python fsdp1_frozen_unit_stays_gathered.py

Three layers, each a unit; the first one, or the second one, is frozen. After a backward every unit
must be sharded again. Of a frozen unit whose inputs need no gradient the whole parameters stay,
where the optimizer sees flat parameters (`use_orig_params=False`, the default).
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

WORLD_SIZE, WIDTH = 2, 100


def run(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=60),
    )
    wrong = check(rank)
    if rank == 0 and wrong:
        open(f"{folder}/wrong", "w").close()
    dist.destroy_process_group()


def gathered(frozen: int, use_orig_params: bool) -> int:
    """Bytes of whole parameters that are held after a forward and a backward."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model[frozen].requires_grad_(False)
    model = FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
    )
    model(torch.randn(3, WIDTH)).sum().backward()
    flats = [unit._handle.flat_param for unit in model.module]
    return sum(flat._full_param_padded.untyped_storage().nbytes() for flat in flats)


def check(rank: int) -> bool:
    wrong = False
    for use_orig_params in (True, False):
        for frozen in (1, 0):
            got = gathered(frozen, use_orig_params)
            wrong = wrong or got > 0
            if rank == 0:
                which = "first" if frozen == 0 else "second"
                words = f"use_orig_params={use_orig_params}, {which} unit frozen"
                print(f"{words}: bytes gathered after the backward {got}", flush=True)
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
