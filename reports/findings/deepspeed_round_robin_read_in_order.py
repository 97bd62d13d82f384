"""torch and DeepSpeed only: with round_robin_gradients safe_get_* read other elements.

    python deepspeed_round_robin_read_in_order.py

Two ranks. Universal checkpoints are cut by the same addresses.
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


def engine_of(model: nn.Module, optimizer: torch.optim.Optimizer, zero: dict[str, Any]) -> Any:
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "reduce_bucket_size": 1024,
            "stage3_param_persistence_threshold": 0,
            **zero,
        },
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine: Any, inputs: torch.Tensor) -> None:
    engine.backward(engine(inputs).square().sum())
    engine.step()


def run(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    wrong = []
    for stage in (1, 2):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        engine = engine_of(model, optimizer, {"stage": stage, "round_robin_gradients": True})
        step(engine, torch.tensor([[1.0, 2.0]]))
        for name, parameter in model.named_parameters():
            if not torch.equal(safe_get_full_fp32_param(parameter), parameter):
                wrong.append(f"stage {stage}, {name}")
    if rank == 0:
        print("safe_get_full_fp32_param is wrong:", *wrong, sep="\n  ")
        if wrong:
            open(f"{folder}/wrong", "w").close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder,), 2)
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
