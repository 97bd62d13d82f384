"""action.yml: its scripts are run as GitHub does, with stand-ins for zerocheck and gh."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}

ZEROCHECK = """#!/bin/bash
echo "zerocheck $*" >> "$CALLS"
case "$1" in
  run) mkdir -p zerocheck-report; echo {} > zerocheck-report/report.json; exit "$RUN" ;;
  report) exit "$REPORT" ;;
esac
"""
GH = """#!/bin/bash
echo "gh $*" >> "$CALLS"
case "$*" in *--paginate*) echo -n "$FOUND" ;; esac
"""


@pytest.fixture
def step(tmp_path: Path) -> Any:
    """step(name, **environment) -> (exit code, calls of the stand-ins, outputs)."""
    for name, text in {"zerocheck": ZEROCHECK, "gh": GH}.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def run(name: str, **given: str) -> tuple[int, list[str], str]:
        calls, outputs = tmp_path / "calls", tmp_path / "outputs"
        for path in (calls, outputs):
            path.write_text("")
        variables = {key: "" for key in STEPS[name].get("env", {})} | {"RUN": "0", "REPORT": "0"}
        environment = {
            **os.environ,
            **variables,
            **given,
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(calls),
            "GITHUB_OUTPUT": str(outputs),
        }
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[name]["run"]]
        done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, timeout=60)
        return done.returncode, calls.read_text().splitlines(), outputs.read_text().strip()

    return run


def test_inputs_are_declared_and_reach_scripts_by_their_environment() -> None:
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    used = set(re.findall(r"inputs\.([\w-]+)", text))
    assert used == set(ACTION["inputs"])
    for one in STEPS.values():
        assert ("run" in one) == ("shell" in one)
        assert "${{" not in one.get("run", "")


@pytest.mark.parametrize(
    ("base", "kept", "run", "report", "code"),
    [
        ("", False, "1", "0", "1"),  # a push: the run decides
        ("main", False, "1", "0", "1"),  # the first pull request: so it does
        ("main", True, "1", "0", "0"),  # what was violated before does not count
        ("main", True, "0", "1", "1"),
        ("main", True, "2", "0", "2"),  # wrong usage is nothing to compare
    ],
)
def test_the_check(
    step: Any, tmp_path: Path, base: str, kept: bool, run: str, report: str, code: str
) -> None:
    if kept:
        (tmp_path / "zerocheck-baseline").mkdir()
        (tmp_path / "zerocheck-baseline" / "report.json").write_text("{}")
    ended, calls, outputs = step(
        "Check",
        IMPLEMENTATION="fsdp2 zero1",
        ARGUMENTS="--profile ci",
        REPORT_DIR="zerocheck-report",
        BASE=base,
        RUN=run,
        REPORT=report,
    )
    assert (ended, outputs) == (0, f"exit-code={code}")
    assert calls[0] == "zerocheck run fsdp2 zero1 --profile ci --report-dir zerocheck-report"
    compared = "zerocheck report zerocheck-report --against zerocheck-baseline"
    assert calls[1:] == ([compared] if kept and run != "2" else [])
    assert step("Verdict", CODE=code)[0] == int(code)


@pytest.mark.parametrize(("found", "method"), [("", "POST"), ("17\n18\n", "PATCH")])
def test_the_comment_is_replaced(step: Any, found: str, method: str) -> None:
    ended, calls, _ = step("Comment", REPOSITORY="me/my", NUMBER="7", REPORT_DIR="out", FOUND=found)
    assert ended == 0 and len(calls) == 2
    assert f"--method {method} repos/me/my/issues/" in calls[1]
    assert calls[1].endswith("--field body=@out/comment.md")
    assert ("comments/17 " in calls[1]) == bool(found)


def test_the_next_baseline_is_the_report(step: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.json").write_text("{}")
    assert step("Next baseline", REPORT_DIR="out")[0] == 0
    assert (tmp_path / "zerocheck-baseline" / "report.json").is_file()
