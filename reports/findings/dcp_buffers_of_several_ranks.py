"""torch only: dcp.save takes running_mean of one rank and running_var of another.

    python dcp_buffers_of_several_ranks.py

The buffers of BatchNorm differ between the ranks of DDP, which broadcasts those of rank 0 before
the next forward. The checkpoint holds a mixture that no rank had.
Exits 1 while the fault is there, and 0 when it is gone.
"""

import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

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
    wrong = check(rank, folder)
    if rank == 0 and wrong:
        open(f"{folder}/wrong", "w").close()
    dist.destroy_process_group()


def check(rank: int, folder: str) -> bool:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)))
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))
    model(inputs).sum().backward()
    states = get_model_state_dict(model)
    held: list[dict[str, torch.Tensor]] = [{} for _ in range(WORLD_SIZE)]
    dist.all_gather_object(held, {name: value.clone() for name, value in states.items()})
    dcp.save(states, checkpoint_id=f"{folder}/checkpoint")
    read = {name: torch.zeros_like(value) for name, value in states.items()}
    dcp.load(read, checkpoint_id=f"{folder}/checkpoint")
    ranks = set()
    for name in ("1.running_mean", "1.running_var"):
        (of,) = (r for r in range(WORLD_SIZE) if torch.equal(held[r][name], read[name]))
        ranks.add(of)
        if rank == 0:
            print(f"{name}: expected that of one rank with the other; got that of rank {of}")
    return len(ranks) > 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
