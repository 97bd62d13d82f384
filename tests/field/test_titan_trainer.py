"""torchtitan's own Trainer, on CPU ranks: right runs hold, and a bug is found where it begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_attach_trainers import result, trained

from zerocheck.attached.saves.in_files import examined

TRAINER = "titan_trainer.py"


@pytest.mark.parametrize("accumulation", ["1", "2"])
def test_right_trainings_hold(accumulation: str, tmp_path: Path) -> None:
    assert result(TRAINER, tmp_path, "--steps", "3", "--accumulation", accumulation) == (
        "RESULT holds ownership, gradient, clip, update, publish; violated []; not judged {}"
    )


JOINT = "'the norm, which is also that of parameters outside of the attached model'"


@pytest.mark.parametrize(
    ("ranks", "axes", "unjudged"),
    [
        (2, ("--tp", "2"), "{}"),
        (2, ("--pp", "2"), f"{{'clip': {JOINT}}}"),
        (4, ("--pp", "2", "--tp", "2"), f"{{'clip': {JOINT}}}"),
        (2, ("--moe", "--ep", "2"), "{}"),
        (4, ("--moe", "--ep", "2"), "{}"),
        (4, ("--moe", "--ep", "2", "--tp", "2"), "{}"),
        (4, ("--moe", "--ep", "2", "--pp", "2"), "{}"),
    ],
)
def test_composed_trainings_hold(
    ranks: int, axes: tuple[str, ...], unjudged: str, tmp_path: Path
) -> None:
    """Of a pipeline each rank has two parts of the model, and one norm."""
    line, said = trained(TRAINER, tmp_path, "--steps", "3", *axes, ranks=ranks)
    buffers = ", buffers" * ("--moe" in axes)
    assert line == (
        f"RESULT holds ownership, gradient, clip, update, publish{buffers}; violated []; "
        f"not judged {unjudged}"
    )
    assert "of them wrong" not in said


def test_a_layer_that_is_divided_by_ep(tmp_path: Path) -> None:
    """torchtitan PR 3206: the divisor of a unit is that of another mesh."""
    asked = ("--moe", "--ep", "2", "--steps", "1", "--fault", "a layer divided by ep")
    assert "gradient: gradient / ep" in trained(TRAINER, tmp_path, *asked, ranks=4)[0]


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


def test_checkpoints_are_recorded_and_loads_judged(tmp_path: Path) -> None:
    saves = ("--saves", str(tmp_path / "saves"))
    assert "violated []" in trained(TRAINER, tmp_path, "--steps", "4", *saves)[0]
    report = examined(tmp_path / "saves" / "checkpoint" / "step-2")
    assert not report.findings and "recorded" in report.checked
    line, said = trained(TRAINER, tmp_path, "--steps", "5", *saves)
    assert "violated []" in line and "0 of 1 loads wrong" in said, said
    wrong = ("--steps", "6", "--fault", "optimizer not loaded", *saves)
    said = trained(TRAINER, tmp_path, *wrong)[1]
    assert "1 of 1 loads wrong" in said and "exp_avg of every parameter" in said, said
