"""torch and DeepSpeed only: a factor that stage 3 divides by is not multiplied by on as many ranks.

    python deepspeed3_predivide_factor.py

Each rank has the gradient 1.0, so their mean is 1.0. SGD with lr 1 shows it in the parameters.
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


def engine_of(model: nn.Module, stage: int, factor: float) -> Any:
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "gradient_predivide_factor": factor,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1024, "reduce_scatter": False},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def run(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD_SIZE
    )
    wrong = []
    for stage, factor in ((2, 2.0), (3, 1.0), (3, 2.0), (3, 4.0)):
        model = nn.Linear(4, 1, bias=False)
        engine = engine_of(model, stage, factor)
        weight = engine.module.weight
        before = safe_get_full_fp32_param(weight).clone()
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        mean = (before - safe_get_full_fp32_param(weight)).flatten()
        if rank == 0:
            print(f"stage {stage}, factor {factor:g}: {mean[0]:.5f}", flush=True)
        if not torch.allclose(mean, torch.ones(4), atol=1e-5):
            wrong.append((stage, factor))
    if rank == 0 and wrong:
        print(f"not the mean of 1.0 and 1.0: stage and factor {wrong}", flush=True)
        open(f"{folder}/wrong", "w").close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(folder,), nprocs=WORLD_SIZE)
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
