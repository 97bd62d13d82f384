"""`zerocheck.attach` in a script that trains on a GPU, a model of 1e9 parameters included."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = "train_on_gpu.py"
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sharding", ["ddp", "fsdp1", "fsdp2"])
def test_what_is_right_holds(train: Command, tmp_path: Path, sharding: str, ranks: int) -> None:
    done = train(SCRIPT, ranks, sharding, 100)
    assert done.returncode == 0, done.stdout + done.stderr
    for step in (1, 2, 4):
        assert f"step {step}" in done.stderr
    assert not (tmp_path / "zerocheck-attach").exists()


def test_a_model_of_1e9_parameters(train: Command) -> None:
    done = train(SCRIPT, 1, "fsdp2", 1000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checked 1.0" in done.stdout
    print(done.stdout)


def test_a_fault_is_caught_and_its_bundle_judged_again(
    train: Command, tmp_path: Path, zerocheck: Command
) -> None:
    done = train(SCRIPT, 2, "fsdp2", 40, 4)
    assert done.returncode != 0 and "update" in done.stderr, done.stdout + done.stderr
    bundle = tmp_path / "zerocheck-attach" / "step-4"
    again = zerocheck("replay", bundle)
    assert again.returncode == 1 and "reproduced" in again.stdout, again.stdout + again.stderr
