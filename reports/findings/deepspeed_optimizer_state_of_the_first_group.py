"""torch and DeepSpeed only: safe_get_full_optimizer_state fails on all groups but the first.

    python deepspeed_optimizer_state_of_the_first_group.py

Two parameter groups on one rank.
"""

import os
import sys
import tempfile
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_optimizer_state
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


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        failed = []
        for stage in (1, 2):
            model = nn.Linear(2, 1)
            groups = [{"params": [model.bias]}, {"params": [model.weight]}]
            engine = engine_of(model, torch.optim.AdamW(groups), {"stage": stage})
            for _ in range(2):
                step(engine, torch.tensor([[1.0, 2.0]]))
            for name, parameter in model.named_parameters():
                try:
                    safe_get_full_optimizer_state(parameter, "exp_avg")
                except ValueError as error:
                    failed.append(name)
                    print(f"stage {stage}, {name}: ValueError: {error}")
        sys.exit(bool(failed))
