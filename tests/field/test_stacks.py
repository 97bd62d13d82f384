"""Third-party stacks that train rightly: `zerocheck run` finds nothing, in the profile ci."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import zerocheck

HERE = Path(__file__).parent
PROFILE = os.environ.get("ZEROCHECK_FIELD_PROFILE", "quick")
CASES = os.environ.get("ZEROCHECK_FIELD_CASES", "24")

SHARDERS = (
    "torch_defaults.py:ddp",
    "torch_defaults.py:fsdp1",
    "torch_defaults.py:fsdp1_flat",
    "torch_defaults.py:fsdp1_mesh",
    "torch_defaults.py:fsdp2",
    "accelerate_stacks.py:ddp",
    "accelerate_stacks.py:ddp_unused",
    "accelerate_stacks.py:fsdp1",
    "accelerate_stacks.py:fsdp2",
    "fabric.py:ddp",
    "fabric.py:fsdp2",
)
MODELS = ("llama", "gpt2", "mixtral", "bert")


def result(where: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`zerocheck run` of stacks in this folder."""
    package = Path(zerocheck.__file__).parent.parent
    path = [str(package), str(package / "reference"), *sys.path]
    return subprocess.run(
        [sys.executable, "-m", "zerocheck", "run", *options, "--report-dir", str(where)],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": ":".join(path)},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )


def _drawn(*more: str) -> tuple[str, ...]:
    cases = () if PROFILE == "ci" else ("--max-cases", CASES)  # ci asks for all pairs
    return ("--profile", PROFILE, *cases, "--world-sizes", "1,2,3", *more)


@pytest.mark.parametrize("sharder", SHARDERS)
def test_a_right_stack_holds(sharder: str, tmp_path: Path) -> None:
    done = result(tmp_path, sharder, *_drawn())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


@pytest.mark.parametrize("sharder", ["torch_defaults.py:ddp", "torch_defaults.py:fsdp2"])
@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_transformers_holds(sharder: str, model: str, tmp_path: Path) -> None:
    done = result(tmp_path, sharder, "--model", f"transformers_models.py:{model}", *_drawn())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


@pytest.mark.parametrize("sharder", ["torch_defaults.py:ddp", "torch_defaults.py:fsdp2"])
def test_memory_and_resume_hold(sharder: str, tmp_path: Path) -> None:
    # Few cases need not kill a writer or damage a checkpoint, and what none exercises fails.
    resume = "resume" if PROFILE == "ci" else "export,roundtrip,continuation"
    asked = _drawn("--obligations", f"equivalence,memory,{resume}")
    done = result(tmp_path, sharder, *asked)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


def test_a_plugin_that_is_ignored_is_said(tmp_path: Path) -> None:
    done = result(tmp_path, "accelerate_stacks.py:ignored_fsdp2", *_drawn())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "nothing is sharded" in done.stdout
