"""torch only: FSDP2 cannot train a unit that is unfrozen later, with mixed precision.

    python fsdp2_unit_unfrozen_with_a_param_dtype.py

All parameters of a unit are frozen in the first forward and trained from then on, with parameters
cast to bf16: the next backward raises RuntimeError. Without a cast it trains.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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


class Model(nn.Module):
    """Two layers, each a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs))


def unfreeze(param_dtype: torch.dtype | None) -> str:
    model = Model()
    model.last.requires_grad_(False)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    for module in (model.first, model.last, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    try:
        for trains in (False, True):
            model.last.requires_grad_(trains)
            model(torch.ones(1, 2)).float().sum().backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).partition('.')[0]}"
    return "no error"


def check(rank: int) -> bool:
    wrong = False
    for param_dtype in (None, torch.bfloat16):
        got = unfreeze(param_dtype)
        wrong = wrong or got != "no error"
        if rank == 0:
            print(f"param_dtype={param_dtype}: expected no error, got {got}", flush=True)
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
