"""Implementations of installed packages: a fake distribution on sys.path brings them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from zerocheck.catalogue import (
    check_installed,
    check_spelling,
    installed,
    is_built_in,
    package_of,
    place_of,
)
from zerocheck.cli import main
from zerocheck.errors import UsageError

SHARDER = """
import torch
import zerocheck


def build(model, case, mesh):
    wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    return zerocheck.Built(wrapped, torch.optim.AdamW(zerocheck.groups(wrapped, case)))


build.fixed = {"training": {"microbatches": 1, "clip": None}}
build.semantics = zerocheck.Semantics(unused="skip", buffers="rank0", weight="token")
"""
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make a distribution, with these entry points, that is on sys.path."""

    def made(*points: str, package: str = "their-sharder") -> Path:
        folder = tmp_path / package
        info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = "\n".join(["[zerocheck.implementations]", *points])
        (info / "entry_points.txt").write_text(f"{lines}\n")
        monkeypatch.syspath_prepend(str(folder))
        installed.cache_clear()
        return folder

    monkeypatch.chdir(tmp_path)
    yield made  # type: ignore[misc]
    installed.cache_clear()


def test_a_package_brings_a_name(install: Install) -> None:
    install("their-ddp = their_sharder:build")
    check_spelling("their-ddp+nothing")
    assert place_of("their-ddp") == "their_sharder:build"
    assert package_of("their-ddp") == "their-sharder" and not package_of("ddp")
    assert not is_built_in("their-ddp")
    with pytest.raises(
        UsageError, match="unknown implementation 'their-dpd'; did you mean 'their-"
    ):
        check_spelling("their-dpd")


@pytest.mark.parametrize(
    ("point", "name", "message"),
    [
        ("ddp = their:Ddp", "ddp", "'ddp' is built in, and an installed package has the same name"),
        (
            "mine = their",
            "mine",
            r"declared as their-sharder \(their\); needed is package.module:N",
        ),
        ("a+b = their:Ddp", "a+b", "cannot be a name"),
    ],
)
def test_what_cannot_be_used_is_refused(
    install: Install, point: str, name: str, message: str
) -> None:
    install(point)
    listed = CliRunner().invoke(main, ["list"])
    assert listed.exit_code == 0 and f"refused: '{name}'" in listed.output
    with pytest.raises(UsageError, match=message):
        check_installed(name)


def test_packages_with_one_name(install: Install) -> None:
    install("theirs = one:build", package="one")
    install("theirs = two:build", package="two")
    with pytest.raises(UsageError, match=r"of several packages: one \(one:build\) and two \(two:b"):
        check_installed("theirs")
    check_installed("fsdp2")


def test_it_is_listed_and_not_imported(install: Install) -> None:
    install("their-ddp = their_sharder:build", "broken = no_such_module:build")
    listed = CliRunner().invoke(main, ["list"])
    assert "their-ddp  their_sharder:build (package their-sharder)" in listed.output
    assert "broken     no_such_module:build (package their-sharder)" in listed.output


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("their-ddp", 0, "all obligations hold"),
        ("ddp", 2, "'ddp' is built in, and an installed package has the same name: their-sharder"),
        (
            "broken",
            2,
            "broken, of the installed package their-sharder: module 'no_such_module' doe",
        ),
    ],
)
def test_it_runs(install: Install, tmp_path: Path, name: str, code: int, message: str) -> None:
    folder = install(
        "their-ddp = their_sharder:build",
        "broken = no_such_module:build",
        "ddp = their_sharder:build",
    )
    (folder / "their_sharder.py").write_text(SHARDER)
    command = [sys.executable, "-m", "zerocheck", "run", name, "--world-sizes", "2"]
    command += ["--max-cases", "2", "--obligations", "gradient"]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert message in done.stdout + done.stderr
