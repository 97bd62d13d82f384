"""Print what `attach(metrics=...)` costs: per step, and in a job of two ranks with FSDP2.

python reports/integrations/metrics_price.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from zerocheck.attached.attach import attach

ROOT = Path(__file__).parent.parent.parent
STEPS, EMPTY, TIMES = 300, 5000, 3


class PricedBlock(nn.Module):
    """Two linear layers with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def job(folder: str) -> None:
    """Train on this rank; print seconds, and microseconds of a step in which nothing happens.

    folder: "" for no metrics.
    """
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(PricedBlock(256) for _ in range(4)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    check = attach(model, optimizer, steps=(), every=None, metrics=folder or None)
    x = torch.randn(64, 256)
    started = time.perf_counter()
    for _ in range(STEPS):
        with check.step():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    seconds = time.perf_counter() - started
    dist.barrier()
    started = time.perf_counter()
    for _ in range(EMPTY):
        with check.step():
            pass
    empty = (time.perf_counter() - started) / EMPTY
    if dist.get_rank() == 0:
        print(f"SECONDS {seconds:.4f} EMPTY {1e6 * empty:.2f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measured(folder: str) -> tuple[float, float]:
    """Seconds of a job of two ranks, and microseconds of an empty step."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*program, "--nproc-per-node", "2", __file__, "job", folder],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'reference'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = next(line for line in done.stdout.splitlines() if "SECONDS" in line).split()
    return float(words[1]), float(words[3])


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        job(sys.argv[2])
        sys.exit()
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for _ in range(TIMES):
        for with_metrics in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                found[with_metrics].append(measured(folder if with_metrics else ""))
    ratios = [a[0] / b[0] for a, b in zip(found[True], found[False], strict=True)]
    print(f"{STEPS} steps of {statistics.median(b[0] for b in found[False]) / STEPS:.4f} s")
    print(f"with metrics: {', '.join(f'{one:.4f}' for one in ratios)} times the seconds")
    for with_metrics, rows in found.items():
        words = "with" if with_metrics else "without"
        print(
            f"an empty step {words}: {statistics.median(one[1] for one in rows):.1f} microseconds"
        )
