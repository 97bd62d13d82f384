"""Measures of the code that only go down: lines, exceptions to rules of ruff."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUDGET = tomllib.loads((ROOT / "tests" / "budget.toml").read_text())
LINT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
EXCEPTIONS = [(name, rule) for name, rules in LINT["per-file-ignores"].items() for rule in rules]
MOST_FILES = 20
SLACK = 500
"""Lines that a folder may have less than its budget, before the budget is lowered."""


@pytest.mark.parametrize("folder", sorted(BUDGET["lines"]))
def test_lines(folder: str) -> None:
    """A feature that needs more lines names what it deletes or shrinks."""
    lines = sum(one.read_bytes().count(b"\n") for one in (ROOT / folder).rglob("*.py"))
    budget = BUDGET["lines"][folder]
    assert lines <= budget, f"{folder} has {lines} lines, {lines - budget} more than its budget"
    assert lines > budget - SLACK, f"{folder} has {lines} lines: lower its budget of {budget}"


def test_files_of_a_folder() -> None:
    """At most 20, without `__init__.py`, but for those that are listed with what they have."""
    found = {}
    for folder in (ROOT / "zerocheck").rglob("__init__.py"):
        count = len([*folder.parent.glob("*.py")]) - 1
        if count > MOST_FILES:
            found[folder.parent.relative_to(ROOT).as_posix()] = count
    assert found == BUDGET["files"]


@pytest.mark.parametrize(("name", "rule"), EXCEPTIONS)
def test_each_exception_is_needed(name: str, rule: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", rule]
    command += ["--output-format", "json"]
    for option in (
        f"lint.mccabe.max-complexity={LINT['mccabe']['max-complexity']}",
        f"lint.pylint.max-args={LINT['pylint']['max-args']}",
    ):
        command += ["--config", option]
    found = subprocess.run([*command, name], cwd=ROOT, capture_output=True, text=True)
    assert json.loads(found.stdout), (
        f"{name} has no finding of {rule} any more: take it from the list"
    )
