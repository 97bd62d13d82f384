"""A project that uses zerocheck, installed with it into an environment of its own, and run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from slices import sliced

ROOT = Path(__file__).parent.parent
PROJECT = Path(__file__).parent / "example_project"
NAME = "example_sharder.sharding:MyFSDP"
SOUND = "module.set_gradient_divide_factor(float(mesh.size()))"
PLANTED = "module.set_gradient_divide_factor(1.0)"


def call(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command that sees nothing of this session but the machine's settings.

    Constraints of isolated builds are left out: pip refuses them where nothing is isolated.
    """
    hidden = ("PYTHON", "PYTEST", "GITHUB", "PIP_BUILD_CONSTRAINT")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**kept, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheels of zerocheck and the project.

    It reads what they need, torch above all, from the environment of this session, which stands
    after its own packages.
    """
    folder = tmp_path_factory.mktemp("environment")
    built = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    pip = (sys.executable, "-m", "pip")
    for command in (
        (*pip, "wheel", "--quiet", *built, "--no-deps", "-w", folder / "wheels", ROOT, PROJECT),
        (sys.executable, "-m", "venv", "--without-pip", folder / "venv"),
    ):
        done = call(*command, cwd=folder)
        assert done.returncode == 0, done.stderr
    python = folder / "venv" / "bin" / "python"
    wheels = sorted((folder / "wheels").glob("*.whl"))
    assert len(wheels) == 2
    install = ("--python", python, "install", "--quiet", "--no-deps", "--no-index")
    done = call(*pip, *install, *wheels, cwd=folder)
    assert done.returncode == 0, done.stderr
    packages = Path(torch.__file__).parent.parent
    (own,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (own / "zzz-rest.pth").write_text(f"{packages}\n")
    return python


@pytest.fixture
def project(python: Path, tmp_path: Path) -> Path:
    """A copy of the project to run in."""
    shutil.copytree(PROJECT, tmp_path / "project", ignore=shutil.ignore_patterns("example_sharder"))
    return tmp_path / "project"


def installed(python: Path) -> Path:
    """The project's sharding, as it was installed."""
    (file,) = (python.parent.parent / "lib").glob(
        "python*/site-packages/example_sharder/sharding.py"
    )
    return file


def run_tests(
    python: Path, project: Path, *more: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The tests, by the command of the project's workflow; more: options that it does not have."""
    workflow = (project / ".github" / "workflows" / "conformance.yml").read_text()
    found = re.search(r"run: (pytest .*)", workflow)
    assert found is not None
    command = (*shlex.split(found.group(1)), *more)
    return call(python, "-P", "-m", *command, cwd=project, **environment)


def verdicts(report: Path) -> Any:
    """What a report says of the code under test, times and paths aside."""
    data = json.loads(report.read_text())
    implementation = data["implementations"][NAME]
    del implementation["seconds"]
    for finding in data["findings"]:
        del finding["case_file"], finding["replay"]
    return data["exit_code"], implementation, data["findings"]


@pytest.mark.long
def test_it_passes_in_an_environment_of_its_own(python: Path, project: Path) -> None:
    where = call(python, "-P", "-c", "import zerocheck; print(zerocheck.__file__)", cwd=project)
    assert where.stdout.startswith(str(python.parent.parent)), where.stdout + where.stderr
    done = run_tests(python, project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout) and "failed" not in done.stdout
    assert (project / "junit.xml").is_file()


@pytest.mark.long
def test_a_planted_bug_is_named_and_pytest_says_what_the_command_says(
    python: Path, project: Path
) -> None:
    file = installed(python)
    sound = file.read_text()
    assert sound.count(SOUND) == 1
    file.write_text(sound.replace(SOUND, PLANTED))
    try:
        # The search for a small case takes as long as the rest, and is the engine's.
        tested = run_tests(
            *(python, project, *sliced((), ("--zerocheck-shrink", "no"))),
            GITHUB_ACTIONS="true",
            GITHUB_STEP_SUMMARY="summary.md",
        )
        program = python.parent / "zerocheck"
        cases = re.search(
            r"max_cases=(\d+)", (project / "tests" / "test_conformance.py").read_text()
        )
        assert cases is not None
        options = ("--max-cases", cases.group(1), "--report-dir", "cli")
        message = call(program, "run", NAME, *options, *sliced((), ("--no-shrink",)), cwd=project)
    finally:
        file.write_text(sound)
    assert tested.returncode == message.returncode == 1, (
        tested.stdout + tested.stderr + message.stderr
    )
    for output in (tested.stdout, message.stdout):
        answer = "gradient is 2 times too large: summed over 2 ranks, not averaged. If intended, "
        assert f"VIOLATED {NAME}: {answer}declare Semantics(average='sum')" in output
        assert "  cause       gradient x W\n" in output
    assert re.search(r"(?m)^FAILED .*\[MyFSDP-gradient-basic\] - VIOLATED", tested.stdout)
    assert f"--implementation {NAME}\n" in tested.stdout
    assert "::error title=VIOLATED" in tested.stdout  # installed, so not a file of the repository
    assert "gradient x W" in (project / "summary.md").read_text()
    (report,) = (project / "zerocheck-report").glob("*/report.json")
    assert verdicts(report) == verdicts(project / "cli" / "report.json")
