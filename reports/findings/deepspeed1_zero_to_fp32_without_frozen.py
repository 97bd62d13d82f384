"""torch and DeepSpeed only: zero_to_fp32 leaves frozen parameters of a stage-1 checkpoint out.

    python deepspeed1_zero_to_fp32_without_frozen.py

One rank, a frozen layer before one that is trained.
"""

import os
import sys
import tempfile
from contextlib import redirect_stdout
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
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
        missing = {}
        for stage in (1, 2, 3):
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
            model[0].requires_grad_(False)
            optimizer = torch.optim.AdamW(model[1].parameters())
            engine = engine_of(model, optimizer, {"stage": stage})
            step(engine, torch.tensor([[1.0, 2.0]]))
            engine.save_checkpoint(f"{folder}/{stage}")
            with redirect_stdout(None):
                given = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{stage}")
            missing[stage] = [name for name, _ in model.named_parameters() if name not in given]
            print(f"stage {stage}: zero_to_fp32 leaves out {missing[stage]}")
        sys.exit(any(missing.values()))
