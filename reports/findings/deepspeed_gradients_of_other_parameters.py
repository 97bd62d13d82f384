"""torch and DeepSpeed only: gradients of parameters that other ranks did not use are mixed up.

    python deepspeed_gradients_of_other_parameters.py

Of two layers of the same size each rank uses its own. SGD with lr 1 shows the gradients.
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
from torch import nn

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

WORLD_SIZE = 2


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


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(2, 1, bias=False)
        self.right = nn.Linear(2, 1, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        layer = self.left if dist.get_rank() == 0 else self.right
        return layer(inputs)  # type: ignore[no-any-return]


def whole(model: nn.Module, stage: int) -> dict[str, torch.Tensor]:
    """All parameters, which stage 3 has to gather."""
    every = [*model.parameters()]
    with deepspeed.zero.GatheredParameters(every, enabled=stage == 3):
        return {name: one.detach().clone() for name, one in model.named_parameters()}


def run(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD_SIZE
    )
    wrong = []
    for stage in (0, 1, 2, 3):
        torch.manual_seed(0)
        model = Either()
        engine = engine_of(model, stage)
        before = whole(model, stage)
        inputs = torch.tensor([[1.0, 2.0]] if rank == 0 else [[10.0, 20.0]])
        engine.backward(engine(inputs).sum())
        engine.step()
        moved = {name: before[name] - one for name, one in whole(model, stage).items()}
        if rank == 0:
            print(
                f"stage {stage}:", {name: one.tolist() for name, one in moved.items()}, flush=True
            )
        right = {"left.weight": [[0.5, 1.0]], "right.weight": [[5.0, 10.0]]}
        off = [n for n, one in moved.items() if not torch.allclose(one, torch.tensor(right[n]))]
        wrong += [(stage, name) for name in off]
    if rank == 0 and wrong:
        print("wrong gradients: stage and parameter", wrong, flush=True)
        open(f"{folder}/wrong", "w").close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(folder,), nprocs=WORLD_SIZE)
        sys.exit(1 if os.path.exists(f"{folder}/wrong") else 0)
