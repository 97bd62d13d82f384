"""torch only: FSDP2 rounds what each use of a parameter gives, before autograd adds them.

    python fsdp2_uses_added_in_the_reduce_dtype.py

A forward in fp32 uses one weight three times: what the uses give is 512, 1 and -512. With
`MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)` the gradient is 0: autograd casts to bf16 before
it adds. Without it the sum, which bf16 holds exactly, is 1.
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
    """A weight that is used three times, as one of a recurrent model is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return sum(self.weight * one for one in inputs)


def check(rank: int) -> bool:
    wrong = False
    for dtype in (None, torch.bfloat16):
        model = Model()
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD_SIZE,)), mp_policy=policy)
        model(torch.tensor([512.0, 1.0, -512.0])).sum().backward()
        got = model.weight.grad.full_tensor()[0].item()
        wrong = wrong or got != 1.0
        if rank == 0:
            print(f"reduce_dtype={dtype}: expected gradient 1.0, got {got}", flush=True)
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
