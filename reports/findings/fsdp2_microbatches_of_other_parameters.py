"""torch only: FSDP2 fails where microbatches use other parameters of a unit, with a reduce dtype.

    python fsdp2_microbatches_of_other_parameters.py

Parameters are cast to bf16 and gradients reduced in fp32, the usual choice, over two microbatches
of which the first uses one layer of a unit and the second both: the backward raises AssertionError.
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
    """A layer for every batch, and one for some: both in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, inputs: torch.Tensor, more: bool) -> torch.Tensor:
        outputs = self.always(inputs)
        return outputs + self.sometimes(inputs) if more else outputs


def accumulate(reduce_dtype: torch.dtype | None) -> str:
    model = Model()
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    try:
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model(torch.ones(1, 2), last).float().sum().backward()
    except AssertionError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def check(rank: int) -> bool:
    wrong = False
    for reduce_dtype in (None, torch.float32):
        got = accumulate(reduce_dtype)
        wrong = wrong or got != "no error"
        if rank == 0:
            print(f"reduce_dtype={reduce_dtype}: expected no error, got {got}", flush=True)
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
