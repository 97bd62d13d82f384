"""torch and DeepSpeed only: a universal checkpoint restores neither buffers nor frozen weights.

    python deepspeed_universal_without_buffers.py

One rank trains, saves, converts, and loads into another model.
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


def model_of() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(one for one in model.parameters() if one.requires_grad)


def seen(model: nn.Module) -> dict[str, torch.Tensor]:
    frozen = model[0].weight  # type: ignore[index]
    return {
        "frozen weight": getattr(frozen, "ds_tensor", frozen).detach().clone(),
        "running mean": model[1].running_mean.clone(),  # type: ignore[index,operator]
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        wrong = []
        for stage in (1, 2, 3):
            model = model_of()
            engine = engine_of(model, adamw(model), {"stage": stage})
            step(engine, torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
            saved = seen(model)
            engine.save_checkpoint(f"{folder}/{stage}")
            convert(f"{folder}/{stage}")
            other = model_of()
            loading = engine_of(other, adamw(other), {"stage": stage}, universal=True)
            loading.load_checkpoint(f"{folder}/{stage}")
            loaded = seen(other)
            wrong += [(stage, name) for name in saved if not torch.equal(saved[name], loaded[name])]
        for stage, name in wrong:
            print(f"stage {stage}: the {name} is not what was saved")
        sys.exit(bool(wrong))
