"""A training loop with accelerate on CPU ranks, checked by zerocheck.integrations.accelerate.

torchrun --nproc-per-node 2 accelerate_loop.py --accumulation 2
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from trainer_faults import Planted, asked, checks, line

from zerocheck.integrations.accelerate import check


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))


if __name__ == "__main__":
    given = asked()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=given.accumulation,
        mixed_precision="bf16" if given.bf16 else "no",
        dynamo_backend="inductor" if given.compile else None,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=given.unused)],
    )
    model: Any = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))
    loader: Any = torch.utils.data.DataLoader(batches, 4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    attached = None
    if not given.unchecked:
        reference = None if given.no_reference else make_model
        attached = check(accelerator, reference=reference, **checks(given))
    planted = Planted(given)
    if given.resume:
        accelerator.load_state(given.saves)
    taken = attached.taken if attached is not None else 0  # those of an earlier run
    started = time.perf_counter()
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        with accelerator.accumulate(model):
            planted.trained(
                model,
                lambda: accelerator.backward(model(batch).square().mean()),  # noqa: B023
            )
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        taken += accelerator.sync_gradients
        if given.saves and not given.resume and taken == 2 and accelerator.sync_gradients:
            accelerator.save_state(given.saves)
        if taken == given.steps and accelerator.sync_gradients:
            break
    if accelerator.is_main_process:
        print(f"SECONDS {time.perf_counter() - started:.3f}")
        print(line(attached), flush=True)
    dist.destroy_process_group()
