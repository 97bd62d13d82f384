"""torch and DeepSpeed only: what does not go through the engine is not divided by the microbatches.

    python deepspeed_past_the_engine.py

The loss is engine(x) + engine.module(x), so the weight's gradient is 2 in every microbatch. SGD
with lr 1 shows what the optimizer was given.
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


def given(stage: int, microbatches: int, *, torch_style: bool) -> float:
    """Take one step, and return the gradient of it."""
    engine = engine_of(nn.Linear(4, 1, bias=False), stage, microbatches)
    weight = engine.module.weight
    before = safe_get_full_fp32_param(weight).clone()
    x = torch.ones(1, 4)
    for _ in range(microbatches):
        loss = engine(x).sum() + engine.module(x).sum()
        if torch_style:
            loss.backward()
        else:
            engine.backward(loss)
        with torch.no_grad():  # for gloo: deepspeed_gathers_with_autograd.py
            engine.step()
    return float((before - safe_get_full_fp32_param(weight)).flatten()[0])


def run(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD_SIZE
    )
    wrong = False
    for stage in (1, 2, 3):
        for torch_style in (False, True):
            for microbatches in (1, 4):
                found = given(stage, microbatches, torch_style=torch_style)
                name = "loss.backward()" if torch_style else "engine.backward(loss)"
                if rank == 0:
                    print(
                        f"stage {stage}, {name}, {microbatches} microbatches: {found:.2f} of 2.00",
                        flush=True,
                    )
                wrong = wrong or abs(found - 2) > 1e-3
    if rank == 0 and wrong:
        print("what goes past the engine counts once for each microbatch", flush=True)
        open(f"{folder}/wrong", "w").close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(folder,), nprocs=WORLD_SIZE)
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
