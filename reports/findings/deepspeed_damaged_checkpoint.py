"""torch and DeepSpeed only: a flipped bit of a checkpoint is loaded as a number.

    python deepspeed_damaged_checkpoint.py

One rank; the fp32 copies of stage 1 are damaged, from which the weights are taken.
"""

import os
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))


def engine_of(model: nn.Module) -> Any:
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1024},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        model = nn.Linear(8, 1, bias=False)
        nn.init.ones_(model.weight)
        engine_of(model).save_checkpoint(folder, tag="saved")
        path = Path(folder, "saved", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        data = path.read_bytes()
        ones = struct.pack("<8f", *[1.0] * 8)
        at = data.index(ones)
        path.write_bytes(data[:at] + struct.pack("<f", 3.0) + data[at + 4 :])
        other = nn.Linear(8, 1, bias=False)
        loading = engine_of(other)
        loading.load_checkpoint(folder)
        master = loading.optimizer.single_partition_of_fp32_groups[0]
        print(f"saved 1.0, loaded {float(master[0])}")
        sys.exit(float(master[0]) != 1.0)
