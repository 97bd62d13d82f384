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


def changed(forms: Path, bug: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Findings of a run of the form with the bug, or with what is right in its place."""
    path = forms / f"{bug['form']}.py"
    text = path.read_text()
    for right, wrong in ([bug["right"], bug[kind]], *bug.get("also", ())):
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    path.write_text(text)
    asked = ("--world-sizes", bug.get("ranks", "2,4"), *bug.get("options", ()))
    return findings(forms, bug["form"], *asked)


@pytest.mark.every(34)
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught_first_and_named(forms: Path, name: str) -> None:
    bug = BUGS[name]
    first, *_ = changed(forms, bug, "wrong")
    assert first["obligation"] == bug["obligation"], first
    assert "cause" not in bug or bug["cause"] in first["causes"], first
    assert bug.get("made_of", "") in first["violation"]["attribution"], first


@pytest.mark.every(34)
@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if "right_too" in bug])
def test_what_is_right_in_its_place_holds(forms: Path, name: str) -> None:
    assert changed(forms, BUGS[name], "right_too") == []
