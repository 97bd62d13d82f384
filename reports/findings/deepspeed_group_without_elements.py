"""torch and DeepSpeed only: stages 1 and 2 fail on a group whose parameters have no elements.

    python deepspeed_group_without_elements.py

The factors of an adapter of rank 0, in a group of their own, on one rank.
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


def engine_of(model: nn.Module, groups: list[dict[str, Any]], stage: int) -> Any:
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.SGD(groups, lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.down = nn.Linear(2, 0, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) + self.down(inputs).sum()  # type: ignore[no-any-return]


def step(stage: int, apart: bool) -> str:
    model = Adapted()
    groups = [[*model.layer.parameters()], [*model.down.parameters()]]
    if not apart:
        groups = [[*model.parameters()]]
    try:
        engine = engine_of(model, [{"params": one} for one in groups], stage)
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    except IndexError as error:
        return f"IndexError: {error}"
    return "a step"


if __name__ == "__main__":
    wrong = False
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        for stage in (0, 1, 2):
            for apart in (False, True):
                where = "in a group of its own" if apart else "among others"
                said = step(stage, apart)
                wrong = wrong or said != "a step"
                print(f"stage {stage}, {where}: {said}", flush=True)
    sys.exit(1 if wrong else 0)
