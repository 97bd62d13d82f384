"""What is said of a torch that the tests do not run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from zerocheck import cli
from zerocheck.run import engine
from zerocheck.run.execute.environment import TESTED, untested_versions
from zerocheck.run.known_issues.entries import ours


def test_the_tested_torch_is_silent() -> None:
    assert torch.__version__.split("+")[0] in TESTED
    assert untested_versions() == ""


def test_another_torch_gets_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    monkeypatch.setattr(engine, "run", lambda options, handlers, ranks: 0)
    given = ["run", "ddp", "--report-dir", str(tmp_path)]
    result = CliRunner().invoke(cli.main, given, standalone_mode=False)
    (line,) = [line for line in result.stderr.splitlines() if "2.99.1" in line]
    assert line.startswith("note: zerocheck was not run with torch 2.99.1, but with 2.")
    assert line.endswith("a known issue that is gone there fails nothing")


@pytest.mark.parametrize("version", ours()[0].versions.measured["torch"])
def test_a_torch_that_was_measured_is_silent(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", f"{version}+cu132")
    assert untested_versions() == ""
