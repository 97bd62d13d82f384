"""torch only: the state-dict API counts optimizer steps that were never taken.

    python state_dict_invents_a_step_for_an_unused_parameter.py

A checkpoint before the first step leaves AdamW with step 1, so the first update is too small; with
eps=0 the parameters are NaN at once.
A parameter that was never used has no state in AdamW. After export and load as a full state dict
(`strict=False`, which torch's error message asks for) it has taken one step, with moments of 0: its
first real update is then too small, as the bias correction believes in two steps.
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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
    """Two layers, of which a forward calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.late = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        return getattr(self, name)(inputs)


def saved_before_the_first_step() -> bool:
    """One process, nothing sharded."""
    wrong = False
    for save in (False, True):
        model = nn.Linear(1, 1, bias=False)
        before = model.weight.item()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
        if save:
            get_optimizer_state_dict(model, optimizer)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        step, got = optimizer.state[model.weight]["step"].item(), before - model.weight.item()
        wrong = wrong or step != 1
        print(f"saved first={save}: expected step 1, update 0.1; got {step:g}, {got:.6f}")
    model = nn.Linear(1, 1, bias=False)
    get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters(), eps=0.0))
    print(f"saved first, eps=0: expected the parameter, got {model.weight.item()}")
    return wrong or bool(model.weight.isnan().any())


def check(rank: int) -> bool:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    wrong = False
    for full in (False, True):
        model = Model()
        for module in (model.used, model.late, model):
            fully_shard(module, mesh=mesh)
        saved = torch.optim.AdamW(model.parameters(), lr=0.1)
        model("used", torch.ones(1, 2)).sum().backward()
        saved.step()
        saved.zero_grad()
        options = StateDictOptions(full_state_dict=full, strict=False)
        state = get_optimizer_state_dict(model, saved, options=options)
        loaded = torch.optim.AdamW(model.parameters(), lr=0.1)
        set_optimizer_state_dict(model, loaded, state, options=options)
        for group in loaded.param_groups:
            group["weight_decay"] = 0.0
        before = model.late.weight.full_tensor()
        model("late", torch.ones(1, 2)).sum().backward()
        loaded.step()
        got = round((before - model.late.weight.full_tensor()).max().item(), 6)
        wrong = wrong or got != 0.1
        if rank == 0:
            step = loaded.state[model.late.weight]["step"].item()
            print(f"full_state_dict={full}: expected step 1, update 0.1; got {step:g}, {got}")
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        wrong = saved_before_the_first_step()
        sys.exit(1 if wrong or os.path.exists(f"{folder}/wrong") else 0)
