"""torch only: set_model_state_dict permutes a weight that is not contiguous on ranks other than 0.

    python broadcast_from_rank_0_permutes_a_transposed_weight.py

With broadcast_from_rank0=True the bytes of rank 0 are sent in the order of memory, and received
into a contiguous tensor.
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
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

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


def check(rank: int) -> bool:
    wrong = False
    for layout in (torch.contiguous_format, torch.channels_last):
        model = nn.Conv2d(2, 1, 2, bias=False).to(memory_format=layout)
        whole = torch.arange(8.0).view(1, 2, 2, 2).to(memory_format=layout)
        set_model_state_dict(
            model,
            {"weight": whole} if rank == 0 else {},
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )
        held = [torch.empty(8) for _ in range(WORLD_SIZE)]
        dist.all_gather(held, model.weight.detach().contiguous().view(-1))
        expected = whole.contiguous().view(-1).tolist()
        got = [one.tolist() for one in held]
        wrong = wrong or any(one != expected for one in got)
        if rank == 0:
            print(f"{str(layout)[6:]}: expected {expected} on every rank, got {got}")
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
