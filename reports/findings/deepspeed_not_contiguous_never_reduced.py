"""torch and DeepSpeed only: stages 1 and 2 reduce no gradient on a CPU, in buckets of their own.

    python deepspeed_not_contiguous_never_reduced.py

The gradient is 1.0 on rank 0 and 2.0 on rank 1, so that the mean is 1.5. SGD with lr 1 shows it.
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
from torch import nn

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

WORLD_SIZE = 2


def engine_of(model: nn.Module, stage: int) -> Any:
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "contiguous_gradients": False,
            "reduce_bucket_size": 1024,
        },
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def run(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD_SIZE
    )
    wrong = False
    for stage in (1, 2):
        engine = engine_of(nn.Linear(4, 1, bias=False), stage)
        before = engine.module.weight.detach().clone()
        engine.backward(engine(torch.full((1, 4), rank + 1.0)).sum())
        with torch.no_grad():  # else the step fails on gloo: deepspeed_gathers_with_autograd.py
            engine.step()
        given = (before - engine.module.weight.detach()).flatten()
        if rank == 0:
            print(f"stage {stage}: {[round(float(one), 3) for one in given]}", flush=True)
        wrong |= not torch.allclose(given, torch.full((4,), 1.5), atol=1e-3)
    if rank == 0 and wrong:
        print("not the mean, 1.5", flush=True)
        open(f"{folder}/wrong", "w").close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(folder,), nprocs=WORLD_SIZE)
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
