"""torch only: an optimizer that is made before fully_shard trains nothing, and nothing says so.

    python fsdp2_optimizer_made_first.py

The loss stays where it is.
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
from torch.distributed.fsdp import fully_shard

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
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if rank == 0:
            gradient = model.bias.grad.to_local()[0]
            print(f"step {step}: loss {loss:.6f}, a gradient {gradient:.6f}", flush=True)
    if losses[0] == losses[-1]:
        open(f"{rendezvous}-wrong", "w").close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(f"{folder}/rendezvous",), nprocs=WORLD_SIZE)
        sys.exit(1 if os.path.exists(f"{folder}/rendezvous-wrong") else 0)
