"""Integrations with transformers, Lightning and accelerate: right runs hold, bugs are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import zerocheck

HERE = Path(__file__).parent
TRAINERS = ("transformers_trainer.py", "lightning_trainer.py", "accelerate_loop.py")


def result(trainer: str, where: Path, *options: str) -> str:
    """The line that a training on two ranks prints at its end."""
    package = Path(zerocheck.__file__).parent.parent
    path = [str(package), str(package / "reference"), *sys.path]
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*program, "--nproc-per-node", "2", str(HERE / trainer), *options],
        cwd=where,
        env={**os.environ, "PYTHONPATH": ":".join(path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "No step is checked from here on" not in done.stderr, done.stderr
    assert done.stderr.count("zerocheck: step") == (0 if "--fault" in options else 4), done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--accumulation", "2"),
        ("--unused",),
        ("--accumulation", "2", "--unused"),
        ("--bf16", "--accumulation", "2"),
    ],
    ids=" ".join,
)
def test_right_trainings_hold(trainer: str, options: tuple[str, ...], tmp_path: Path) -> None:
    assert result(trainer, tmp_path, *options) == (
        "RESULT holds ownership, gradient, clip, update, publish; violated []; not judged {}"
    )


@pytest.mark.parametrize("trainer", TRAINERS)
def test_without_a_reference_states_hold(trainer: str, tmp_path: Path) -> None:
    assert result(trainer, tmp_path, "--no-reference") == (
        "RESULT holds ownership, clip, update, publish; violated []; not judged {}"
    )


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(
    ("fault", "options", "cause"),
    [
        ("doubled", (), "gradient doubled"),
        ("doubled", ("--bf16", "--accumulation", "2"), "gradient: "),
        ("doubled on rank 1", ("--no-reference",), "copies of the gradient differ"),
        ("doubled on rank 1", ("--unused",), "gradient: "),
        ("not reduced", ("--unused",), "local gradient only"),
        ("not reduced", ("--accumulation", "2"), "local gradient only"),
    ],
)
def test_bugs_are_named(
    trainer: str, fault: str, options: tuple[str, ...], cause: str, tmp_path: Path
) -> None:
    message = result(trainer, tmp_path, "--fault", fault, *options)
    assert cause in message.partition("violated")[2], message
