"""Tests of the nearest spelling, and of what is said where a dependency is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from zerocheck.case.features import FEATURES
from zerocheck.errors import DEPENDENCIES, did_you_mean, not_installed

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("cliping", "clip"),  # not clip-inf, which has more letters in common
        ("clip-infs", "clip-inf"),
        ("uneven-totl", "uneven-total"),  # not uneven, with which it begins
        ("tyed", "tied"),
        ("Droput", "dropout"),
        ("kernel-fusd", "kernel-fused"),
    ],
)
def test_the_nearest_feature(given: str, meant: str) -> None:
    assert did_you_mean(given, FEATURES) == f"; did you mean {meant!r}?"


def test_nothing_near() -> None:
    assert did_you_mean("xyz", FEATURES) == ""
    assert did_you_mean("clip", []) == ""


def test_the_dependencies_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [Requirement(one).name for one in project["dependencies"]] == list(DEPENDENCIES)


@pytest.mark.parametrize(
    ("name", "said"), [("torch", True), ("torch.distributed", True), ("my_model", False)]
)
def test_what_is_not_installed_is_said(name: str, *, said: bool) -> None:
    message = not_installed(ModuleNotFoundError(f"No module named {name!r}", name=name))
    assert (message is not None) is said
    assert not said or "zerocheck needs torch, which is not installed here" in str(message)


@pytest.mark.parametrize("command", [[], ["run", "ddp"]])
def test_a_source_tree_without_its_dependencies(command: list[str], tmp_path: Path) -> None:
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'reference'}", "PATH": os.environ["PATH"]}
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "zerocheck", *command],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "error: zerocheck needs click, which is not installed here" in ended.stderr
