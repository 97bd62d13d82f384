"""Scripts show their fault where torch is installed alone, and nothing where there is none."""

from __future__ import annotations

import json
import subprocess
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
from making import in_scripts, known, script
from packaging.requirements import Requirement
from slices import sliced

from zerocheck.run.known_issues.releases import Releases
from zerocheck.run.records.records import CaseFile
from zerocheck.script import script_of

MLP = {"blocks": [{"kind": "mlp"}]}
EVERY_OPTION = {
    "model": {
        "blocks": [
            {"kind": "attention", "heads": 2, "residual": True},
            {"kind": "batch_norm", "checkpoint": True},
        ],
        "calls": [0, 1, 0],
    },
    "training": {"clip": 0.5, "microbatches": 2, "steps": 2},
    "optimizer": {"groups": [{"pattern": "*.bias", "weight_decay": 0.0}, {"lr": 0.01}]},
    "start": {"step": 255, "moments": "typical"},
}

USERS = """
import torch
import zerocheck
from torch.distributed.fsdp import FSDPModule, fully_shard


def right(model, case, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return zerocheck.Built(model, torch.optim.AdamW(zerocheck.groups(model, case)))


def sums(model, case, mesh):
    built = right(model, case, mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule) and case.training.microbatches == 1:
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return built
"""


def needed(name: str, found: set[str]) -> set[str]:
    """Names of a distribution and of all that it requires."""
    if name not in found:
        found.add(name)
        for line in distribution(name).requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed(requirement.name, found)
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with torch alone: links to what is installed here."""
    folder = tmp_path_factory.mktemp("alone") / "venv"
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in needed("torch", set()):
        files = distribution(name).files or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (packages / top).symlink_to(str(distribution(name).locate_file(top)))
    return folder / "bin" / "python"


def known_files() -> dict[str, CaseFile]:
    """One known issue of torch for each page; the strategies of FSDP1 differ by a word."""
    files: dict[str, CaseFile] = {}
    for issue in in_scripts():
        if issue.known_in(Releases({"torch": "2.13.0"})):
            files.setdefault(f"known {issue.page}", known(issue))
    return files


def texts(folder: Path) -> dict[str, str]:
    """All scripts, by name. What is right is named so."""
    (folder / "mine.py").write_text(USERS)
    faults = {name: script_of(file) for name, file in known_files().items()}
    found = dict(faults)
    for name, text in faults.items():
        if "static_graph=True" in text:
            found[f"right {name}"] = text.replace("static_graph=True", "static_graph=False")
    crash = next(text for text in faults.values() if "static_graph=True" in text)
    found["another error"] = crash.replace("static_graph=True", "no_such_option=True")
    found["a user's"] = script(f"{folder}/mine.py:sums", model=MLP)
    found["right a user's"] = script(f"{folder}/mine.py:right", model=MLP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerocheck.script.write.LONGEST", 1000)
        for name in ("ddp", "zero-redundancy", "fsdp2"):
            found[f"right {name}"] = script(name, None, model=MLP)
        found["right options"] = script("fsdp1-no-shard", None, **EVERY_OPTION)
        for kind in ("adam", "adagrad", "rmsprop"):
            given = {**EVERY_OPTION["optimizer"], "kind": kind}  # type: ignore[dict-item]
            options = {**EVERY_OPTION, "optimizer": given}
            found[f"right {kind}"] = script("fsdp1-no-shard", None, **options)
        units = {"sharding": {"wrap": "layer"}}
        found["right units"] = script("fsdp1", None, **EVERY_OPTION, **units)
    return found


@pytest.fixture(scope="module")
def shown(
    request: pytest.FixtureRequest, python: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str]]:
    """Exit code and output of each script that is asked for. They share one import of torch."""
    folder = tmp_path_factory.mktemp("scripts")
    given = texts(folder)
    right = [name for name in given if name.startswith("right ")]
    asked = {*sliced(right, right[::3]), "a user's", "another error"}
    asked |= {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    given = {name: text for name, text in given.items() if name in asked}
    paths = [folder / f"{number}.py" for number in range(len(given))]
    for path, text in zip(paths, given.values(), strict=True):
        path.write_text(text)
    done = subprocess.run(
        [str(python), "-I", str(Path(__file__).parent / "runner.py"), *map(str, paths)],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: (code, message) for name, (code, message) in zip(given, replies, strict=True)}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [*known_files(), "a user's"])
def test_a_fault_is_shown(shown: dict[str, tuple[int, str]], name: str) -> None:
    code, message = shown[name]
    assert code == 1 and "Traceback" not in message, message
    crash = name in known_files() and known_files()[name].status == "crashed"
    assert crash or " expected " in message, message


def test_what_is_right_shows_nothing(shown: dict[str, tuple[int, str]]) -> None:
    right = {name: reply for name, reply in shown.items() if name.startswith("right ")}
    assert len(right) >= sliced(12, 4)
    for name, (code, message) in right.items():
        assert code == 0 and "off by" not in message, (name, message)


def test_a_users_fault_is_told_in_numbers(shown: dict[str, tuple[int, str]]) -> None:
    assert "off by 2.0e+00" in shown["a user's"][1]  # three times the gradient


def test_another_error_is_not_the_crash(shown: dict[str, tuple[int, str]]) -> None:
    code, message = shown["another error"]
    assert code == 1 and "Traceback" in message and "no_such_option" in message


def test_a_script_is_run_by_itself(python: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USERS)
    (tmp_path / "script.py").write_text(script(f"{tmp_path}/mine.py:sums", model=MLP))
    command = [str(python), "-I", str(tmp_path / "script.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "step 0, rank 0, gradient of " in done.stdout and "Traceback" not in done.stderr
    command = [str(python), "-I", "-c", "import zerocheck"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "No module named 'zerocheck'" in done.stderr
