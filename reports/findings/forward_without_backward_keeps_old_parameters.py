"""torch only: after a forward without a backward, FSDP computes with old parameters.

    python forward_without_backward_keeps_old_parameters.py

Between the backward and the optimizer step the model is evaluated once, under `torch.no_grad`.
That forward leaves the root unit gathered, so the next forward does not gather it again: it does
not see what the optimizer step wrote.
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
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

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


def difference(kind: str, evaluate: bool) -> float:
    """How far the output after one step is from that of a model without sharding."""
    torch.manual_seed(0)
    plain, model = nn.Linear(4, 2), nn.Linear(4, 2)
    model.load_state_dict(plain.state_dict())
    inputs = torch.randn(3, 4)
    if kind == "FSDP1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
    for module in (plain, model):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(inputs).square().sum().backward()
        if evaluate:
            with torch.no_grad():
                module(inputs)
        optimizer.step()
    return (model(inputs) - plain(inputs)).abs().max().item()


def check(rank: int) -> bool:
    wrong = False
    for kind in ("FSDP1", "FSDP2"):
        for evaluate in (False, True):
            got = difference(kind, evaluate)
            wrong = wrong or got > 1e-5
            if rank == 0:
                label = "with" if evaluate else "without"
                print(f"{kind}, {label} an evaluation: expected 0, got {got:.6f}", flush=True)
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
