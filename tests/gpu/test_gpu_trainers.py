"""Trainers of other libraries on a GPU: what is right holds, what is not is named."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Command = Callable[..., subprocess.CompletedProcess[str]]
RUNS = [
    (trainer, sharding)
    for trainer in ("transformers", "accelerate", "lightning")
    for sharding in ("ddp", "fsdp1", "fsdp2")
    if (trainer, sharding) != ("lightning", "fsdp2")  # there the module shards itself
]


def trained(train: Command, ranks: int, *given: str) -> str:
    """What the training says."""
    pytest.importorskip(given[0])
    done = train("trainers_on_gpu.py", ranks, *given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No step is checked from here on" not in done.stderr, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("trainer", "sharding"), RUNS)
def test_a_right_training_holds(train: Command, trainer: str, sharding: str, ranks: int) -> None:
    said = trained(train, ranks, trainer, sharding, "fp32")
    assert "4 of 4 steps checked, all hold" in said, said
    assert "violated []; not judged {}" in said, said


@pytest.mark.parametrize(("trainer", "sharding"), RUNS)
def test_a_right_training_in_bf16_holds(train: Command, trainer: str, sharding: str) -> None:
    said = trained(train, 2, trainer, sharding, "bf16")
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
    train: Command, trainer: str, sharding: str, cause: str
) -> None:
    said = trained(train, 2, trainer, sharding, "fp32", "doubled")
    assert cause in said, said
