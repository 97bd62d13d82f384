"""torch and DeepSpeed only: the gradient of an earlier step is applied.

    python deepspeed_gradient_of_an_earlier_step.py

The second step leaves a layer out. SGD with lr 1 shows the gradients: by stage 3, and by stages 1
and 2 with an optimizer that is offloaded to the CPU.
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


def engine_of(model: nn.Module, stage: int, offload: str) -> Any:
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
            "offload_optimizer": {"device": offload},
        },
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(2, 1, bias=False)
        self.sometimes = nn.Linear(2, 1, bias=False)

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        outputs = self.always(inputs)
        return outputs + self.sometimes(inputs) if both else outputs  # type: ignore[no-any-return]


def shown(stage: int, offload: str) -> bool:
    """Whether the layer has no gradient in the step that leaves it out."""
    engine = engine_of(Sometimes(), stage, offload)
    layer = engine.module.sometimes.weight
    watched = layer.ds_tensor if stage == 3 else layer
    gradients = []
    for both in (True, False):
        before = watched.detach().clone()
        engine.backward(engine(torch.tensor([[1.0, 2.0]]), both).sum())
        engine.step()
        gradients.append((before - watched.detach()).flatten().tolist())
    print(f"stage {stage}, offload {offload}: used {gradients[0]}, not used {gradients[1]}")
    return gradients[1] == [0.0, 0.0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        wrong = [
            (stage, offload)
            for stage in (1, 2, 3)
            for offload in ("none", "cpu")
            if not shown(stage, offload)
        ]
    if wrong:
        print("a gradient of a layer that was not used: stage and offload", wrong)
    sys.exit(1 if wrong else 0)
