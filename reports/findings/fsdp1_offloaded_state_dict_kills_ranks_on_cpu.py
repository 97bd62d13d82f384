"""torch only: a full state dict with offload_to_cpu kills the ranks of FSDP1 on CPU.

    python fsdp1_offloaded_state_dict_kills_ranks_on_cpu.py

Offloading to CPU frees the gathered parameters after it copied them to the CPU. Where they were
there already nothing was copied, so the state dict reads memory that was freed.
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
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

WORLD_SIZE = 2


def run(rank: int, folder: str, use_orig_params: bool) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=10),
    )
    model = nn.Linear(2, 2, bias=False)
    expected = nn.init.ones_(model.weight).tolist()
    model = FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )
    options = FullStateDictConfig(offload_to_cpu=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, options):
        got = model.state_dict()["weight"].tolist()
    if rank == 0:
        print(f"expected {expected}, got {got}", flush=True)
    assert got == expected


if __name__ == "__main__":
    wrong = False
    for use_orig_params in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            try:
                arguments = (folder, use_orig_params)
                mp.start_processes(run, arguments, nprocs=WORLD_SIZE, start_method="fork")
            except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
                died = isinstance(error, mp.ProcessExitedException)
                if not died and "setStorage" not in str(error) and "got ==" not in str(error):
                    raise
                wrong = True
                reason = str(error).strip().splitlines()[-1]
                print(f"use_orig_params={use_orig_params}: a rank died: {reason}", flush=True)
    sys.exit(1 if wrong else 0)
