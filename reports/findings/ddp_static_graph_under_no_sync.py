"""torch only: DDP with static_graph fails in the first backward under no_sync.

    python ddp_static_graph_under_no_sync.py

Gradient accumulation as the documentation of no_sync shows it.
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

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

WORLD_SIZE = 2


def run(rank: int, rendezvous: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=10),
    )
    model = DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
    try:
        with model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
        print(f"rank {rank}: right", flush=True)
    except RuntimeError as error:
        if "expect_autograd_hooks_" not in str(error):
            raise
        open(f"{rendezvous}-wrong", "w").close()
        print(f"rank {rank}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(f"{folder}/rendezvous",), nprocs=WORLD_SIZE)
        sys.exit(1 if os.path.exists(f"{folder}/rendezvous-wrong") else 0)
