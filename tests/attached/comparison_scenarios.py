"""The same step in jobs of other shapes: one state, and one batch that the ranks share."""

from __future__ import annotations

from functools import partial
from typing import Any

import planted
import torch
import torch.distributed as dist
from scenarios import WRAPS, net
from wrong_reductions import after_backward, multiplied

import zerocheck
from zerocheck.attached.record.holdings import local


def compared(
    wrap: str, *, directory: str, fault: str = "", seed: int = 5, lr: float = 1e-2
) -> dict[str, Any]:
    """Two steps on shares of 12 samples, recorded and not checked. fault: from the first on."""
    model = WRAPS[wrap](net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    check = zerocheck.attach(
        model,
        optimizer,
        reference=net,
        steps=(),
        every=None,
        directory=directory,
        recorder="1GiB",
        on_violation="warn",
    )
    size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(2):
        batch = torch.randn(12, 6, generator=torch.Generator().manual_seed(seed + step))
        factor = 2 if fault == "doubled" else 1
        with after_backward(partial(multiplied, model, factor)), check.step():
            model(batch.chunk(size)[rank]).square().mean().backward()
            if fault == "scaled":
                multiplied(model, 0.7)
            planted.clip(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
            if fault == "decayed":
                with torch.no_grad():
                    for parameter in model.parameters():
                        local(parameter).mul_(0.999)
    return {"taken": check.taken}
