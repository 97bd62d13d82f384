"""torch and accelerate only: a sharded checkpoint of FSDP1 is loaded without the optimizer's state.

    python accelerate_optimizer_of_fsdp1_not_loaded.py

Two processes take three steps and save; two new ones load, and print the step counts of the
optimizer. accelerate ignores FSDP on the CPU, so its state is told that it is on a GPU.
"""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

WORLD_SIZE = 2


def run(rank: int, folder: str, resumes: bool) -> None:
    warnings.simplefilter("ignore")
    rendezvous = f"file://{folder}/rendezvous-{resumes}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD_SIZE)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1, use_orig_params=True, state_dict_type="SHARDED_STATE_DICT"
    )
    accelerator = Accelerator(cpu=True)
    for state in (accelerator.state.__dict__, PartialState._shared_state):
        state["distributed_type"], state["device"] = DistributedType.FSDP, torch.device("cpu")
    accelerator.state.fsdp_plugin = plugin
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    if resumes:
        accelerator.load_state(f"{folder}/checkpoint")
    for _ in range(0 if resumes else 3):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
    if not resumes:
        accelerator.save_state(f"{folder}/checkpoint")
    steps = [int(state["step"]) for state in optimizer.state.values()]
    if rank == 0:
        print(f"{'loaded' if resumes else 'saved'}: steps of the optimizer {steps}", flush=True)
        if resumes and 3 not in steps:
            open(f"{folder}/wrong", "w").close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for resumes in (False, True):
            mp.spawn(run, args=(folder, resumes), nprocs=WORLD_SIZE)
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
