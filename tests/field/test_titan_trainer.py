"""torchtitan's own Trainer, on CPU ranks: right runs hold, and a bug is found where it begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_attach_trainers import result, trained

TRAINER = "titan_trainer.py"


@pytest.mark.parametrize("accumulation", ["1", "2"])
def test_right_trainings_hold(accumulation: str, tmp_path: Path) -> None:
    assert result(TRAINER, tmp_path, "--steps", "3", "--accumulation", accumulation) == (
        "RESULT holds ownership, gradient, clip, update, publish; violated []; not judged {}"
    )


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("doubled", "gradient doubled"),
        ("doubled on rank 1", "gradient scaled"),
        ("not reduced", "local gradient only"),
        ("a gradient zeroed", "gradient zero"),
        ("drift on rank 1", ""),
    ],
)
def test_the_first_wrong_step(fault: str, cause: str, tmp_path: Path) -> None:
    options = ("--steps", "6", "--every", "3", "--recorder", "256MiB", "--begin", "5")
    line, said = trained(TRAINER, tmp_path, *options, "--fault", fault)
    assert "first step  5 is the first wrong one: step 4 was recorded and hold" in said, said
    assert cause in line, line
