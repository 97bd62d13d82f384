"""A training loop with accelerate on CPU ranks, checked by zerocheck.integrations.accelerate.

torchrun --nproc-per-node 2 accelerate_loop.py --accumulation 2
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from trainer_faults import asked, line, trained

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
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=given.unused)],
    )
    model: Any = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))
    loader: Any = torch.utils.data.DataLoader(batches, 4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    attached = check(
        accelerator,
        steps=range(1, given.steps + 1),
        reference=None if given.no_reference else make_model,
        on_violation="warn",
        directory=tempfile.mkdtemp(),
    )
    if given.resume:
        accelerator.load_state(given.saves)
    for batch in loader:
        with accelerator.accumulate(model):
            lonely = given.fault == "not reduced"
            with model.no_sync() if lonely else nullcontext():
                accelerator.backward(model(batch).square().mean())
            trained("" if lonely else given.fault, model, lambda: None)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        if given.saves and not given.resume and attached.taken == 2:
            accelerator.save_state(given.saves)
        if attached.taken == given.steps and accelerator.sync_gradients:
            break
    if accelerator.is_main_process:
        print(line(attached), flush=True)
    dist.destroy_process_group()
