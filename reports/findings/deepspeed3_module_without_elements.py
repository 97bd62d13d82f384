"""torch and DeepSpeed only: stage 3 fails on a module whose parameters have no elements.

    python deepspeed3_module_without_elements.py

An adapter of rank 0, on one rank.
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
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 1024,
            "stage3_param_persistence_threshold": 0,
        },
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.down = nn.Linear(2, 0, bias=False)
        self.up = nn.Linear(0, 2, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) + self.up(self.down(inputs))  # type: ignore[no-any-return]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        for stage in (2, 3):
            engine = engine_of(Adapted(), stage)
            try:
                for _ in range(3):
                    engine.backward(engine(torch.ones(1, 2)).sum())
                    engine.step()
            except AssertionError as error:
                if stage != 3 or "NOT_AVAILABLE" not in str(error):
                    raise
                print(f"stage {stage}: AssertionError: {str(error)[:60]}...", flush=True)
                os._exit(1)  # the engine that failed would wait for its collectives
            print(f"stage {stage}: three steps", flush=True)
