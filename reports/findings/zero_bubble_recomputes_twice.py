"""torch only: a zero-bubble schedule runs a checkpoint again twice, and updates its buffers.

    python zero_bubble_recomputes_twice.py

Two microbatches, so 2 updates in the forward and 2 in the recomputation are expected.
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
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.utils.checkpoint import checkpoint

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

WORLD_SIZE = 2


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=False) * 1


def run(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=30),
    )
    wrong = False
    for schedule in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        modules = [Stage(), Stage()]
        rows = torch.empty(2, 4, requires_grad=True)
        stages = [
            PipelineStage(
                module, rank + 2 * i, 4, torch.device("cpu"), input_args=rows, output_args=rows
            )
            for i, module in enumerate(modules)
        ]
        pipeline = schedule(stages, 2, loss_fn=lambda output, target: output.square().mean())
        given = (torch.randn(4, 4),) if rank == 0 else ()
        pipeline.step(*given, **({} if rank == 0 else {"target": torch.zeros(4)}))
        got = int(modules[1].layers[1].num_batches_tracked)
        wrong = wrong or got != 4
        if rank == 0:
            print(f"{schedule.__name__}: expected 4 updates of a stage, got {got}", flush=True)
    if rank == 0 and wrong:
        open(f"{folder}/wrong", "w").close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=WORLD_SIZE, start_method="fork")
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
