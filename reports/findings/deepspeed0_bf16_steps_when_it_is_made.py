"""torch and DeepSpeed only: in bf16 stage 0 takes a step of the optimizer when it is made.

    python deepspeed0_bf16_steps_when_it_is_made.py

One rank, and no gradient was computed: AdamW decays the weights and counts a step.
"""

import os
import sys
import tempfile
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))


def engine_of(model: nn.Module, stage: int) -> Any:
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1024},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        wrong = False
        for stage in (0, 1):
            model = nn.Linear(1, 1, bias=False)
            nn.init.ones_(model.weight)
            adamw = engine_of(model, stage).basic_optimizer
            (master,) = adamw.param_groups[0]["params"]
            steps = float(adamw.state[master].get("step", 0)) if adamw.state else 0.0
            found = (float(master.detach().reshape(-1)[0]), steps)
            print(f"stage {stage}: master {found[0]:g}, parameter 1, {steps:g} steps", flush=True)
            wrong |= found != (1.0, 0.0)
        sys.exit(int(wrong))
