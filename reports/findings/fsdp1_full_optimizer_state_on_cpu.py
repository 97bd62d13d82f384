"""torch only: on CPU FSDP1 exports exp_avg_sq as exp_avg.

    python fsdp1_full_optimizer_state_on_cpu.py

FSDP.optim_state_dict with FULL_STATE_DICT and its default, offload_to_cpu=True, gives what was
gathered last, exp_avg_sq, for both moments. Without offloading it is right.
Exits 1 while the fault is there, and 0 when it is gone.
"""

import os
import sys
import tempfile
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

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
    wrong = check(rank)
    if rank == 0 and wrong:
        open(f"{folder}/wrong", "w").close()
    dist.destroy_process_group()


def check(rank: int) -> bool:
    wrong = False
    for offload in (False, True):
        model = nn.Linear(2, 2, bias=False)
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.5, 0.75))
        model(torch.full((1, 2), 4.0)).sum().backward()  # every gradient is 4
        optimizer.step()
        with FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=False),
            FullOptimStateDictConfig(offload_to_cpu=offload),
        ):
            state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]["weight"]
        got = [state[name].unique().tolist() for name in ("exp_avg", "exp_avg_sq")]
        wrong = wrong or got != [[2.0], [4.0]]
        if rank == 0:
            print(f"offload_to_cpu={offload}: expected exp_avg 2, exp_avg_sq 4; got {got}")
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
