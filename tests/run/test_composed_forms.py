"""Composed parallelism in drawn cases: the forms of the pages hold, and bugs of threads do not."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from documents import example

FORMS = ("sequences", "experts", "stages", "composed")


def findings(folder: Path, form: str, *options: str) -> list[dict[str, Any]]:
    """Findings of a run of the form in the folder, with few cases."""
    command = [sys.executable, "-m", "zerocheck", "run", f"{form}.py:{form}", *options]
    command += ["--max-cases", "8" if "8" in options else "16", "--no-shrink"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    report = json.loads((folder / "zerocheck-report" / "report.json").read_text())
    assert report["implementations"], report
    return list(report["findings"])


@pytest.fixture
def forms(tmp_path: Path) -> Path:
    for form in FORMS:
        (tmp_path / f"{form}.py").write_text(example(f"{form}.py"))
    return tmp_path


@pytest.mark.every(4)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_holds(forms: Path, form: str) -> None:
    asked = ("--world-sizes", "2,4", "--obligations", "equivalence,resume", "--seed", "3")
    assert findings(forms, form, *asked) == []


BUGS = tomllib.loads((Path(__file__).parent / "composed_bugs.toml").read_text())


@pytest.mark.every(14)
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught_first_and_named(forms: Path, name: str) -> None:
    bug = BUGS[name]
    path = forms / f"{bug['form']}.py"
    text = path.read_text()
    for right, wrong in ([bug["right"], bug["wrong"]], *bug.get("also", ())):
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    path.write_text(text)
    asked = ("--world-sizes", bug.get("ranks", "2,4"), *bug.get("options", ()))
    first, *_ = findings(forms, bug["form"], *asked)
    assert first["obligation"] == bug["obligation"] and bug["cause"] in first["causes"], first
