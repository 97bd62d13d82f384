"""Trainers of other libraries on a GPU: what is right holds, what is not is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "trainers_on_gpu.py"
RUNS = [
    (trainer, sharding)
    for trainer in ("transformers", "accelerate", "lightning")
    for sharding in ("ddp", "fsdp1", "fsdp2")
    if (trainer, sharding) != ("lightning", "fsdp2")  # there the module shards itself
]


def trained(folder: Path, ranks: int, *given: str) -> str:
    """What the training says."""
    pytest.importorskip(given[0])
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*start, "--nproc-per-node", str(ranks), str(SCRIPT), *given],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No step is checked from here on" not in done.stderr, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("trainer", "sharding"), RUNS)
def test_a_right_training_holds(tmp_path: Path, trainer: str, sharding: str, ranks: int) -> None:
    said = trained(tmp_path, ranks, trainer, sharding, "fp32")
    assert "4 of 4 steps checked, all hold" in said, said
    assert "violated []; not judged {}" in said, said


@pytest.mark.parametrize(("trainer", "sharding"), RUNS)
def test_a_right_training_in_bf16_holds(tmp_path: Path, trainer: str, sharding: str) -> None:
    said = trained(tmp_path, 2, trainer, sharding, "bf16")
    assert "4 of 4 steps checked, all hold" in said, said
    assert "violated []; not judged {}" in said, said


@pytest.mark.parametrize(
    ("trainer", "sharding", "cause"),
    [
        ("transformers", "fsdp2", "gradient doubled"),
        ("accelerate", "fsdp1", "changed after clipping"),
        ("lightning", "ddp", "gradient doubled"),
    ],
)
def test_a_doubled_gradient_is_named(
    tmp_path: Path, trainer: str, sharding: str, cause: str
) -> None:
    said = trained(tmp_path, 2, trainer, sharding, "fp32", "doubled")
    assert cause in said, said
