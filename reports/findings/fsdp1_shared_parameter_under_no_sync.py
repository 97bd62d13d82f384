"""torch only: FSDP1 on one rank, in mixed precision, fails on a shared parameter after no_sync().

    python fsdp1_shared_parameter_under_no_sync.py

A head that is tied to the stem, two microbatches, `use_orig_params`. Each line is one way.
Exits 1 while the fault is there, and 0 when it is gone.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        if tied:
            self.head.weight = self.stem.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(inputs))  # type: ignore[no-any-return]


def accumulate(tied: bool, own: bool, low: bool) -> str:
    """Two microbatches; what was raised, or "fine"."""
    model = FullyShardedDataParallel(
        Tied(tied),
        use_orig_params=own,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16) if low else None,
        device_id=torch.device("cpu"),
    )
    try:
        with model.no_sync():
            model(torch.ones(1, 4)).sum().backward()
        model(torch.ones(1, 4)).sum().backward()
    except RuntimeError as error:
        return f"RuntimeError: {str(error).partition('. ')[0]}"
    return "fine"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        print(f"torch {torch.__version__}")
        print("not tied:", accumulate(tied=False, own=True, low=True))
        print("fp32:", accumulate(tied=True, own=True, low=False))
        print("flat parameters:", accumulate(tied=True, own=False, low=True))
        found = accumulate(tied=True, own=True, low=True)
        print("tied, bf16, original parameters:", found)
        dist.destroy_process_group()
    sys.exit(found != "fine")
