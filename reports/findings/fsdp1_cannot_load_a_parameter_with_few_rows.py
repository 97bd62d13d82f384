"""torch only: FSDP1 cannot load its own checkpoint where a parameter has fewer rows than ranks.

    python fsdp1_cannot_load_a_parameter_with_few_rows.py

A model is saved with torch.distributed.checkpoint, and loaded again in the same process. It fails
if FSDP1 was given a process group, or nothing, rather than a device mesh.
Exits 1 while the fault is there, and 0 when it is gone.
"""

import os
import sys
import tempfile
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

warnings.simplefilter("ignore")
WORLD_SIZE = 2


def run(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=10),
    )
    wrong = check(rank, folder)
    if rank == 0 and wrong:
        open(f"{folder}/wrong", "w").close()
    dist.destroy_process_group()


def check(rank: int, folder: str) -> bool:
    wrong = False
    for rows in (WORLD_SIZE, WORLD_SIZE - 1):
        model = FullyShardedDataParallel(nn.Linear(4, rows), device_id=torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        held, moments = get_state_dict(model, optimizer)
        states = {"model": held, "optimizer": moments}
        dcp.save(states, checkpoint_id=f"{folder}/{rows}")
        got = "loaded"
        try:
            dcp.load(states, checkpoint_id=f"{folder}/{rows}")
        except CheckpointException as error:
            got = str(error).strip().splitlines()[-1]
            wrong = True
        if rank == 0:
            print(f"{rows} rows on {WORLD_SIZE} ranks: {got}")
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
