"""torch and DeepSpeed only: a universal checkpoint gives all groups of stage 3 the same options.

    python deepspeed3_universal_mixes_up_groups.py

Two parameter groups, one with weight decay 0, on one rank.
"""

import os
import sys
import tempfile
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from torch import nn

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))


def engine_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    zero: dict[str, Any],
    *,
    universal: bool = False,
) -> Any:
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
        "checkpoint": {"load_universal": universal},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine: Any, inputs: torch.Tensor) -> None:
    engine.backward(engine(inputs).square().sum())
    engine.step()


def convert(folder: str) -> None:
    tag = Path(folder, "latest").read_text()
    options = Namespace(
        input_folder=f"{folder}/{tag}",
        output_folder=f"{folder}/{tag}_universal",
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with redirect_stdout(None), open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        ds_to_universal.main(options)


def adamw(model: nn.Linear) -> torch.optim.Optimizer:
    groups = [
        {"params": [model.bias], "weight_decay": 0.0},
        {"params": [model.weight], "weight_decay": 0.5},
    ]
    return torch.optim.AdamW(groups)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        model = nn.Linear(2, 1)
        engine = engine_of(model, adamw(model), {"stage": 3})
        step(engine, torch.tensor([[1.0, 2.0]]))
        engine.save_checkpoint(folder)
        convert(folder)
        model = nn.Linear(2, 1)
        optimizer = adamw(model)
        loading = engine_of(model, optimizer, {"stage": 3}, universal=True)
        loading.load_checkpoint(folder)
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        step(loading, torch.tensor([[1.0, 2.0]]))
        counts = [int(state["step"]) for state in optimizer.state.values()]
        print(f"weight decays {decays}, step counts after two steps {counts}")
        sys.exit(decays != [0.0, 0.5] or counts != [2, 2])
