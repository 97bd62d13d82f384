"""What the rank processes of these tests do: a small job with metrics."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import zerocheck
from zerocheck.errors import ZerocheckError
from zerocheck.job_metrics.model_size import model_size
from zerocheck.ranks.context import RankContext

WIDTH, BLOCKS, WORDS = 8, 4, 32
TOKENS = (2, 5)
"""Samples and length of a microbatch."""


class SmallBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class SmallModel(nn.Module):
    """Ten layers: an embedding, four blocks of two, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(SmallBlock() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.stem(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def wrapped(kind: str) -> nn.Module:
    model: Any = SmallModel()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind.startswith("fsdp1"):
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({SmallBlock}),
            device_id=torch.device("cpu"),
            use_orig_params=kind == "fsdp1",
        )
    units = {"blocks": model.blocks, "root": ()}.get(kind)
    if units is None:
        units = [one for one in model.modules() if isinstance(one, nn.Linear)]
    for unit in units:
        fully_shard(unit)
    return fully_shard(model)  # type: ignore[no-any-return]


def job(
    folder: str,
    kind: str,
    steps: int = 14,
    microbatches: int = 1,
    late: float = 0.0,
    raises: int = 0,
    saves: tuple[str, ...] = (),
    broken: bool = False,
    **metrics: Any,
) -> dict[str, Any]:
    """Train. late: seconds that rank 1 comes late in every step; raises: step that it leaves."""
    model = wrapped(kind)
    rank = dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters())
    check = zerocheck.attach(
        model,
        optimizer,
        steps=(1, 7),
        every=None,
        metrics=zerocheck.JobMetrics(folder, **metrics),
        directory=Path(folder) / "kept",
    )
    torch.manual_seed(rank)
    for step in range(1, steps + 1):
        if broken and step == 4 and rank == 0:
            check._meter._sinks[0]._file.close()  # type: ignore[union-attr,attr-defined]
        try:
            with check.step():
                if rank == 1 and step == raises:
                    raise KeyError("left")
                time.sleep(late if rank == 1 else 0.0)
                for _ in range(microbatches):
                    if raises == step:
                        continue
                    tokens = torch.randint(0, WORDS, TOKENS)
                    nn.functional.cross_entropy(
                        model(tokens).flatten(0, 1), tokens.flatten()
                    ).backward()
                optimizer.step()
                optimizer.zero_grad()
        except KeyError:
            continue
    for name in saves:
        with check.saving(Path(folder) / name):
            path = Path(folder) / name
            path.mkdir(exist_ok=True)
            (path / f"{rank}.pt").write_bytes(b"saved")
            time.sleep(0.05)
        dist.barrier()
    if saves:
        with check.loading(Path(folder) / saves[-1]):
            pass
    return {"taken": check.taken, "summary": check.summary}


def size(kind: str) -> dict[str, Any]:
    """The size of a model, as every rank sees it."""
    found = model_size(wrapped(kind), torch.device("cpu"))
    return {name: getattr(found, name) for name in found.__struct_fields__}


def run(payload: bytes, context: RankContext) -> bytes:
    """{"call": name, ...} -> what came of it."""
    given = json.loads(payload)
    call = {"job": job, "size": size}[given.pop("call")]
    torch.use_deterministic_algorithms(False)
    try:
        return json.dumps(call(**given)).encode()
    except ZerocheckError as error:
        return json.dumps({"raised": type(error).__name__, "said": str(error)}).encode()
