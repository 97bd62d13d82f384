"""A loop with an engine of DeepSpeed (ZeRO-2), checked by zerocheck.integrations.deepspeed.

torchrun --nproc-per-node 2 engine_loop.py --accumulation 2
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from trainer_faults import Planted, asked, checks, line

from zerocheck.integrations.deepspeed import check


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))


def plant(planted: Planted, zero: Any) -> None:
    """Give the reduction the fault of the step that is being taken."""
    average = zero.average_tensor

    def averaged(bucket: torch.Tensor, *given: Any) -> None:
        if planted.now != "not reduced":
            average(bucket, *given)
        if planted.now == "doubled" or (
            planted.now == "doubled on rank 1" and dist.get_rank() == 1
        ):
            bucket.mul_(2)
        elif planted.now == "a gradient zeroed":
            bucket.zero_()

    zero.average_tensor = averaged


if __name__ == "__main__":
    given = asked()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    deepspeed.init_distributed("gloo", verbose=False)
    model = make_model()
    engine: Any = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": given.accumulation,
            "gradient_clipping": 0.05,
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": given.bf16},
        },
    )[0]
    attached = None
    if not given.unchecked:
        reference = None if given.no_reference else make_model
        attached = check(engine, reference=reference, **checks(given))
    planted = Planted(given)
    plant(planted, engine.optimizer)
    torch.manual_seed(dist.get_rank())
    started = time.perf_counter()
    for _ in range(given.steps):
        if planted.now == "drift on rank 1" and dist.get_rank() == 1:
            engine.optimizer.single_partition_of_fp32_groups[0].data[:5].mul_(1.001)
        for _ in range(given.accumulation):
            batch = torch.randn(4, 8, dtype=torch.bfloat16 if given.bf16 else torch.float32)
            engine.backward(engine(batch).square().mean())
            engine.step()
            planted.count()
    if dist.get_rank() == 0:
        print(f"SECONDS {time.perf_counter() - started:.3f}")
        print(line(attached), flush=True)
    dist.destroy_process_group()
