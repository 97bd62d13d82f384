"""torch and DeepSpeed only: zero_to_fp32 refuses what stage 1 in bf16 saves, where it sums in fp32.

    python deepspeed1_bf16_zero_to_fp32.py

One rank. A line for each dtype of accumulation and stage.
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


def engine_of(model: nn.Module, stage: int, summed: str) -> Any:
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": summed},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1024},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def converted(stage: int, summed: str, folder: str) -> bool:
    """Whether the checkpoint after one step can be converted."""
    engine = engine_of(nn.Linear(2, 1), stage, summed)
    engine.backward(engine(torch.ones(1, 2, dtype=torch.bfloat16)).sum())
    engine.step()
    where = f"{folder}/{stage}-{summed}"
    engine.save_checkpoint(where)
    said = "converted"
    try:
        with redirect_stdout(None):
            get_fp32_state_dict_from_zero_checkpoint(where)
    except ValueError as error:
        said = f"ValueError: ...{str(error)[str(error).rindex('/') :]}"
    print(f"stage {stage}, sums in {summed}: {said}", flush=True)
    return said == "converted"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        found = [converted(n, summed, folder) for n in (1, 2, 3) for summed in ("bf16", "fp32")]
        sys.exit(not all(found))
