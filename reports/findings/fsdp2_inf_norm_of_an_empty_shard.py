"""torch only: clip_grad_norm_ with the infinity norm fails where FSDP2 leaves a rank without rows.

    python fsdp2_inf_norm_of_an_empty_shard.py

Three ranks share a bias of two elements: rank 2 holds none of it. With the 2-norm the call works;
with the infinity norm rank 2 raises, and the others wait for it until they time out.
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

WORLD_SIZE = 3


def run(rank: int, rendezvous: str, norm_type: float) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=10),
    )
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
    model(torch.randn(3, 4)).square().mean().backward()
    try:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=norm_type)
        print(f"norm type {norm_type}, rank {rank}: {norm.full_tensor().item():.6f}", flush=True)
    except Exception as error:
        message = str(error).strip().splitlines()[0]
        print(f"norm type {norm_type}, rank {rank}: {type(error).__name__}: {message}", flush=True)
        if norm_type == 2.0:
            raise
        open(f"{rendezvous}-wrong", "w").close()
    dist.destroy_process_group()


if __name__ == "__main__":
    wrong = False
    for norm_type in (2.0, float("inf")):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, args=(f"{folder}/rendezvous", norm_type), nprocs=WORLD_SIZE)
            wrong = wrong or os.path.exists(f"{folder}/rendezvous-wrong")
    sys.exit(1 if wrong else 0)
