"""torch only: FSDP1 accumulates wrongly where a flat parameter has one element.

    python fsdp1_accumulation_of_one_element.py

Two backwards outside of no_sync. The gradient should be the sum of both means; the first one is
divided by the world size once more.
"""

import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

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
    layer = nn.Linear(1, 1, bias=False)
    model = FullyShardedDataParallel(layer, device_id=torch.device("cpu"), use_orig_params=False)
    for number in (1.0, 10.0):
        model(torch.full((1, 1), number)).sum().backward()
    if rank == 0:
        gradient = next(model.parameters()).grad
        assert gradient is not None
        print(f"gradient {gradient.item()}, right is {1.0 + 10.0}", flush=True)
        if gradient.item() != 1.0 + 10.0:
            open(f"{rendezvous}-wrong", "w").close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(f"{folder}/rendezvous",), nprocs=WORLD_SIZE)
        sys.exit(1 if os.path.exists(f"{folder}/rendezvous-wrong") else 0)
