"""Losses over tokens of which ranks and microbatches have other numbers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from scenarios import WRAPS, answer
from torch import nn

import zerocheck


def reader() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(23, 8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 23))


def tokens(
    wrap: str = "ddp",
    *,
    directory: str,
    loss: str = "right",
    autocast: bool = False,
    scales: bool = False,
    declared: bool = True,
) -> dict[str, Any]:
    """Two steps of three microbatches with 3 to 14 tokens. loss: how they are weighted."""
    model = WRAPS[wrap](reader())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, enabled=scales)
    weight: Any = "token" if declared else "microbatch"
    check = zerocheck.attach(
        model,
        optimizer,
        reference=reader,
        semantics=zerocheck.Semantics(weight=weight),
        steps=(1, 2),
        directory=directory,
        on_violation="warn",
    )
    size, rank = dist.get_world_size(), dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    for _ in range(2):
        given = [torch.randint(23, (2, 7), generator=draw) for _ in range(3)]
        targets = [one.clone() for one in given]
        for number, one in enumerate(targets):
            one.view(-1)[: 4 * number + 3 * rank] = -100
        counts = [int((one != -100).sum()) for one in targets]
        total = torch.tensor(float(sum(counts)))
        dist.all_reduce(total)
        with check.step():
            for number in range(3):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    out = model(given[number])
                smooth = 0.1 if loss == "smooth" else 0.0
                summed = nn.functional.cross_entropy(
                    out.flatten(0, 1),
                    targets[number].flatten(),
                    reduction="sum",
                    label_smoothing=smooth,
                )
                divisor = float(total) / size
                if loss == "mean of means":
                    divisor = 3.0 * counts[number]
                elif loss == "own tokens":
                    divisor = float(sum(counts))
                elif loss == "without ranks":
                    divisor = float(total)
                elif loss == "not divided":
                    divisor /= 3.0
                last = number == 2 or not hasattr(model, "no_sync")
                with nullcontext() if last else model.no_sync():
                    scaler.scale(summed / divisor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return answer(check)
