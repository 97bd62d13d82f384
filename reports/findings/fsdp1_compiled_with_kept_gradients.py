"""torch only: a compiled FSDP1 crashes where zero gradients are kept and Dynamo compiles anew.

    python fsdp1_compiled_with_kept_gradients.py

A mixture of experts in one unit: which expert is called depends on the samples. Each variant takes
steps with zero_grad(set_to_none=...). Exits 1 while the fault is there, and 0 when it is gone.
"""

import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

WORLD_SIZE = 2
STEPS = 6


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.down = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class Experts(nn.Linear):
    """The router, and the experts: each sample goes through one of them."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.experts = nn.ModuleList([Expert(), Expert()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, chosen = super().forward(x).softmax(-1).max(-1)
        outputs = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                outputs = outputs.index_add(0, rows, expert(x[rows]) * share[rows].unsqueeze(1))
        return outputs


def run(rank: int, folder: str, compiles: bool, set_to_none: bool) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(3, 3), Experts(), nn.Linear(3, 3)),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({Experts}),
    )
    if compiles:
        model.compile(backend="eager", dynamic=False)
    torch.manual_seed(rank)
    for step in range(STEPS):
        try:
            model.zero_grad(set_to_none=set_to_none)
            model(torch.randn(2, 3)).sum().backward()
        except Exception as error:
            with open(f"{folder}/wrong", "a") as file:
                said = str(error).splitlines()[0]
                file.write(f"rank {rank}, step {step}: {type(error).__name__}: {said}\n")
            os._exit(1)  # the other rank waits for this one
    os._exit(0)


def steps(compiles: bool, set_to_none: bool) -> str:
    """What was raised."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(
                run, args=(folder, compiles, set_to_none), nprocs=WORLD_SIZE, start_method="fork"
            )
        except mp.ProcessExitedException:
            with open(f"{folder}/wrong") as file:
                return file.readline().strip()
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}")
    wrong = ""
    for compiles, set_to_none in ((False, False), (True, True), (True, False)):
        wrong = steps(compiles, set_to_none)
        print(f"compiled {compiles}, set_to_none {set_to_none}: {wrong or 'fine'}", flush=True)
    sys.exit(1 if wrong else 0)
