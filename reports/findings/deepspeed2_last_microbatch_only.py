"""torch and DeepSpeed only: stage 2 takes the last microbatch of a step for all of them.

    python deepspeed2_last_microbatch_only.py

In microbatch m of M the gradient is m + 1 on every rank, so that the mean is (M + 1) / 2. SGD with
lr 1 shows what the optimizer was given.
"""

import os
import sys
import tempfile
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

WORLD_SIZE = 2


def engine_of(model: nn.Module, stage: int, microbatches: int) -> Any:
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "gradient_accumulation_steps": microbatches,
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def run(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD_SIZE
    )
    wrong = []
    for stage in (1, 2, 3):
        for microbatches in (1, 2, 4):
            engine = engine_of(nn.Linear(4, 1, bias=False), stage, microbatches)
            weight = engine.module.weight
            before = safe_get_full_fp32_param(weight).clone()
            for number in range(microbatches):
                engine.backward(engine(torch.full((1, 4), number + 1.0)).sum())
                with torch.no_grad():  # for gloo: deepspeed_gathers_with_autograd.py
                    engine.step()
            given = (before - safe_get_full_fp32_param(weight)).flatten()
            mean = (microbatches + 1) / 2
            if rank == 0:
                print(
                    f"stage {stage}, {microbatches} microbatches: {given[0]:.2f} of {mean:.2f}",
                    flush=True,
                )
            if not torch.allclose(given, torch.full((4,), mean), atol=1e-3):
                wrong.append(stage)
    if rank == 0 and wrong:
        print(f"the last microbatch alone, divided by their number: stage {wrong}", flush=True)
        open(f"{folder}/wrong", "w").close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(folder,), nprocs=WORLD_SIZE)
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
