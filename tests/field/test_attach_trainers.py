"""Integrations with transformers, Lightning and accelerate: right runs hold, bugs are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zerocheck

HERE = Path(__file__).parent
TRAINERS = ("transformers_trainer.py", "lightning_trainer.py", "accelerate_loop.py")


def result(trainer: str, where: Path, *options: str) -> str:
    """The line that a training on two ranks prints at its end."""
    return trained(trainer, where, *options)[0]


def trained(trainer: str, where: Path, *options: str, ranks: int = 2) -> tuple[str, str]:
    """The line that a training prints at its end, and all that it says on the way."""
    package = Path(zerocheck.__file__).parent.parent
    path = [str(package), str(package / "reference"), *sys.path]
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*program, "--nproc-per-node", str(ranks), str(HERE / trainer), *options],
        cwd=where,
        env={**os.environ, "PYTHONPATH": ":".join(path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "No step is checked from here on" not in done.stderr, done.stderr
    assert "steps checked, " in done.stderr, done.stderr
    lines = done.stdout.splitlines()
    return next(line for line in lines if line.startswith("RESULT")), done.stderr


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--accumulation", "2"),
        ("--unused",),
        ("--accumulation", "2", "--unused"),
        ("--bf16", "--accumulation", "2"),
        ("--compile", "--accumulation", "2"),
        ("--compile", "--bf16"),
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
        ("doubled", ("--compile", "--bf16"), "gradient: "),
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


@pytest.mark.parametrize(
    "options",
    [
        ("--kind", "sft", "--neftune"),
        ("--kind", "sft", "--accumulation", "2", "--compile"),
        ("--kind", "sft", "--lora", "--bf16"),
        ("--kind", "dpo"),
        ("--kind", "dpo", "--lora", "--accumulation", "2"),
        ("--kind", "reward", "--lora"),
    ],
    ids=" ".join,
)
def test_trainers_of_trl_hold(options: tuple[str, ...], tmp_path: Path) -> None:
    assert result("trl_trainers.py", tmp_path, *options) == (
        "RESULT holds ownership, gradient, clip, update, publish; violated []; not judged {}"
    )


@pytest.mark.parametrize("fault", ["doubled", "not reduced"])
@pytest.mark.parametrize("kind", ["sft", "dpo", "reward"])
def test_bugs_in_trainers_of_trl_are_found(fault: str, kind: str, tmp_path: Path) -> None:
    message = result("trl_trainers.py", tmp_path, "--kind", kind, "--lora", "--fault", fault)
    assert "gradient: " in message.partition("violated")[2], message


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resume_of_transformers(ranks: int, tmp_path: Path) -> None:
    """Saved by two ranks. Without its optimizer.pt the Trainer goes on with a new optimizer."""
    saves = str(tmp_path / "saves")
    _, said = trained("transformers_trainer.py", tmp_path, "--saves", saves)
    assert "4 of 4 steps checked, all hold" in said
    for number in (2, 4):
        assert (tmp_path / "saves" / f"checkpoint-{number}" / "zerocheck.json").is_file()
    options = ("--saves", saves, "--resume", "--steps")
    _, said = trained("transformers_trainer.py", tmp_path, *options, "6", ranks=ranks)
    assert "2 of 2 steps checked, all hold" in said and "; 0 of 1 loads wrong" in said
    (tmp_path / "saves" / "checkpoint-6" / "optimizer.pt").unlink()
    _, said = trained("transformers_trainer.py", tmp_path, *options, "8", ranks=ranks)
    assert "; 1 of 1 loads wrong" in said
    assert "exp_avg of every parameter was saved, and is missing" in said
    assert "  cause       optimizer state lost" in said


@pytest.mark.parametrize("accumulation", ["1", "2"])
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("", "violated []"),
        ("mean of means", "violated ['loss: mean of means']"),
        ("own tokens", "violated ['loss: mean of means']"),
    ],
)
def test_weights_of_tokens_in_transformers(
    fault: str, expected: str, accumulation: str, tmp_path: Path
) -> None:
    """transformers 34191: means over microbatches were averaged; and over ranks, by an option."""
    options = ("--tokens", "--accumulation", accumulation, "--fault", fault)
    message, said = trained("transformers_trainer.py", tmp_path, *options)
    assert expected in message and "not judged {}" in message, message
    assert "RESULT holds ownership, loss" in message or fault
    alike = "every microbatch counts alike" in said or "every rank counts alike" in said
    assert alike is bool(fault)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resume_of_accelerate(ranks: int, tmp_path: Path) -> None:
    saves = str(tmp_path / "saves")
    trained("accelerate_loop.py", tmp_path, "--saves", saves)
    options = ("--saves", saves, "--resume")
    _, said = trained("accelerate_loop.py", tmp_path, *options, ranks=ranks)
    assert "2 of 2 steps checked, all hold" in said and "; 0 of 1 loads wrong" in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resume_of_lightning(ranks: int, tmp_path: Path) -> None:
    """By two ranks a checkpoint of step 2; then one whose first moments are lost."""
    saves = str(tmp_path / "saves")
    trained("lightning_trainer.py", tmp_path, "--saves", saves)
    options = ("--saves", saves, "--resume")
    _, said = trained("lightning_trainer.py", tmp_path, *options, ranks=ranks)
    assert "2 of 2 steps checked, all hold" in said and "; 0 of 1 loads wrong" in said
    path = tmp_path / "saves" / "step=2.ckpt"
    saved = torch.load(path, weights_only=False)
    for state in saved["optimizer_states"][0]["state"].values():
        state["exp_avg"].zero_()
    torch.save(saved, path)
    _, said = trained("lightning_trainer.py", tmp_path, *options, ranks=ranks)
    assert "; 1 of 1 loads wrong" in said and "  cause       moments lost" in said


@pytest.mark.parametrize("trainer", TRAINERS)
def test_200_right_steps_hold(trainer: str, tmp_path: Path) -> None:
    _, said = trained(trainer, tmp_path, "--steps", "200", "--every", "10")
    assert "20 of 200 steps checked, all hold" in said


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("doubled", "gradient doubled"),
        ("doubled on rank 1", "gradient scaled"),
        ("not reduced", "local gradient only"),
        ("a gradient zeroed", "gradient zero"),
        ("drift on rank 1", "copies differ"),
    ],
)
def test_a_bug_is_found_at_the_step_that_it_begins_with(
    trainer: str, fault: str, cause: str, tmp_path: Path
) -> None:
    """Checks are every 10 steps; the flight recorder has those between."""
    options = ("--steps", "50", "--every", "10", "--recorder", "64MiB", "--begin", "37")
    _, said = trained(trainer, tmp_path, *options, "--fault", fault)
    assert "first step  37 is the first wrong one: steps 31 to 36 were recorded and hold" in said
    assert cause in said.partition("  cause ")[2].partition("\n")[0], said
