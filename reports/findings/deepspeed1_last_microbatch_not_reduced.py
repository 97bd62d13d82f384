"""torch and DeepSpeed only: stage 1 in bf16 does not reduce the last microbatch over ranks.

    python deepspeed1_last_microbatch_not_reduced.py

The gradient is 1.0 on rank 0 and 2.0 on rank 1 in every microbatch, so that the mean is 1.5.
SGD with lr 1 shows in the fp32 masters what the optimizer was given.
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


def engine_of(model: nn.Module, microbatches: int) -> Any:
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "gradient_accumulation_steps": microbatches,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": 1},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def run(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD_SIZE
    )
    wrong = False
    for microbatches in (1, 2, 4):
        engine = engine_of(nn.Linear(4, 1, bias=False), microbatches)
        weight = engine.module.weight
        before = safe_get_full_fp32_param(weight).clone()
        for _ in range(microbatches):
            engine.backward(engine(torch.full((1, 4), rank + 1.0, dtype=torch.bfloat16)).sum())
            with torch.no_grad():  # else the step fails on gloo: deepspeed_gathers_with_autograd.py
                engine.step()
        given = (before - safe_get_full_fp32_param(weight)).flatten()
        if rank == 0:
            print(
                f"{microbatches} microbatches: {[round(float(one), 3) for one in given]}",
                flush=True,
            )
        wrong |= not torch.allclose(given, torch.full((4,), 1.5), atol=1e-3)
    if rank == 0 and wrong:
        print("not the mean, 1.5", flush=True)
        open(f"{folder}/wrong", "w").close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(folder,), nprocs=WORLD_SIZE)
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
