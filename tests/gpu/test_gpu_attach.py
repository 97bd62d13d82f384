"""`zerocheck.attach` in a script that trains on a GPU, a model of 1e9 parameters included."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "train_on_gpu.py"
Command = Callable[..., subprocess.CompletedProcess[str]]


def trained(
    folder: Path, ranks: int, sharding: str, millions: int, begins: int = 0
) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    start = [*launcher, "--nproc-per-node", str(ranks)]
    command = [*start, str(SCRIPT), sharding, str(millions), str(begins)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1200)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sharding", ["ddp", "fsdp1", "fsdp2"])
def test_what_is_right_holds(tmp_path: Path, sharding: str, ranks: int) -> None:
    done = trained(tmp_path, ranks, sharding, 100)
    assert done.returncode == 0, done.stdout + done.stderr
    for step in (1, 2, 4):
        assert f"step {step}" in done.stderr
    assert not (tmp_path / "zerocheck-attach").exists()


def test_a_model_of_1e9_parameters(tmp_path: Path) -> None:
    done = trained(tmp_path, 1, "fsdp2", 1000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checked 1.0" in done.stdout
    print(done.stdout)


def test_a_fault_is_caught_and_its_bundle_judged_again(tmp_path: Path, zerocheck: Command) -> None:
    done = trained(tmp_path, 2, "fsdp2", 40, begins=4)
    assert done.returncode != 0 and "update" in done.stderr, done.stdout + done.stderr
    bundle = tmp_path / "zerocheck-attach" / "step-4"
    again = zerocheck("replay", bundle)
    assert again.returncode == 1 and "reproduced" in again.stdout, again.stdout + again.stderr
