"""torch only: FSDP1 loads the moments of a weight that is not contiguous into other places.

    python fsdp1_moments_of_a_transposed_weight.py

A convolution in channels_last takes a step with AdamW. Its own state dict, put back into the same
model and optimizer, must change nothing: parameters stay, the moments are permuted.
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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
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
    wrong = check(rank)
    if rank == 0 and wrong:
        open(f"{folder}/wrong", "w").close()
    dist.destroy_process_group()


def check(rank: int) -> bool:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    wrong = False
    for layout in (torch.contiguous_format, torch.channels_last):
        for full in (False, True):
            for use_orig_params in (False, True):
                model = nn.Conv2d(2, 2, 2, bias=False).to(memory_format=layout)
                with torch.no_grad():
                    model.weight.zero_()
                model = FullyShardedDataParallel(
                    model,
                    device_mesh=mesh,
                    device_id=torch.device("cpu"),
                    use_orig_params=use_orig_params,
                )
                optimizer = torch.optim.AdamW(model.parameters())
                model(torch.arange(8.0).view(1, 2, 2, 2)).sum().backward()
                optimizer.step()
                options = StateDictOptions(full_state_dict=full)
                before = moment(optimizer)
                states = get_state_dict(model, optimizer, options=options)
                set_state_dict(
                    model,
                    optimizer,
                    model_state_dict=states[0],
                    optim_state_dict=states[1],
                    options=options,
                )
                after = moment(optimizer)
                wrong = wrong or before != after
                if rank == 0:
                    kind = f"{str(layout)[6:]}, full={full}, use_orig_params={use_orig_params}"
                    print(f"{kind}: exp_avg expected {before}, got {after}")
    return wrong


def moment(optimizer: torch.optim.Optimizer) -> list[float]:
    """What this rank holds of exp_avg, in the order of memory."""
    (state,) = optimizer.state.values()
    return [round(value, 2) for value in state["exp_avg"].tolist()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
