"""Scripts show their fault where torch is installed alone, and nothing where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from making import case_file, known, script
from packaging.requirements import Requirement

from zerocheck.run.known_issues import ours
from zerocheck.run.records import CaseFile
from zerocheck.script import script_of

Run = Callable[[dict[str, str]], dict[str, tuple[int, str]]]

MLP = {"blocks": [{"kind": "mlp"}]}
EVERY_OPTION = {
    "model": {
        "blocks": [
            {"kind": "attention", "heads": 2, "residual": True},
            {"kind": "batch_norm", "checkpoint": True, "gain": True},
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


@pytest.fixture(scope="module")
def run(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run scripts, given as {name: text}; {name: (exit code, output)}."""

    def ran(texts: dict[str, str]) -> dict[str, tuple[int, str]]:
        folder = tmp_path_factory.mktemp("scripts")
        paths = [folder / f"{number}.py" for number in range(len(texts))]
        for path, text in zip(paths, texts.values(), strict=True):
            path.write_text(text)
        done = subprocess.run(
            [str(python), "-I", str(Path(__file__).parent / "runner.py"), *map(str, paths)],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        replies = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(replies) == len(texts)
        return {name: (code, said) for name, (code, said) in zip(texts, replies, strict=True)}

    return ran


def test_known_issues_of_torch_are_shown(run: Run) -> None:
    files: dict[str, CaseFile] = {}
    for issue in ours():
        if issue.case is not None and issue.known_in("2.13.0"):
            # One for each page; the other strategies of FSDP1 have the same script but for a word.
            files.setdefault(issue.page, known(issue))
    shown = run({page: script_of(file) for page, file in files.items()})
    assert len(shown) >= 8
    for page, (code, said) in shown.items():
        assert code == 1, (page, said)
        assert "off by" in said or files[page].status == "crashed", (page, said)
    texts = {page: script_of(file) for page, file in files.items()}
    crashes = [page for page, file in files.items() if file.status == "crashed"]
    for page in crashes:
        text = texts[page].replace("static_graph=True", "static_graph=False")
        assert run({page: text})[page][0] == 0


@pytest.mark.parametrize("fault", [True, False])
def test_injected_faults_are_shown(run: Run, fault: bool) -> None:
    faults = {
        "ddp+average-becomes-sum": script("ddp+average-becomes-sum"),
        "fsdp1+neighbours-shard": script("fsdp1+neighbours-shard"),
        "fsdp2+last-element-local": script("fsdp2+last-element-local"),
        "fsdp2+gather-stale": script("fsdp2+gather-stale", "publish"),
        "fsdp2+norm-local": script("fsdp2+norm-local", "clip", training={"clip": 0.1}),
        "zero-redundancy+broadcast-lost": script("zero-redundancy+broadcast-lost", "publish"),
    }
    if not fault:
        faults = {
            name: text.replace("with Fault():", "with nullcontext():").replace(
                "import tempfile", "import tempfile\nfrom contextlib import nullcontext"
            )
            for name, text in faults.items()
        }
    for name, (code, said) in run(faults).items():
        assert code == int(fault), (name, said)
        assert ("off by" in said) == fault, (name, said)


def test_right_implementations_show_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerocheck.script.write.LONGEST", 1000)
    texts = {name: script(name, None, model=MLP) for name in ("ddp", "zero-redundancy", "fsdp2")}
    texts["every option"] = script("fsdp1-no-shard", None, **EVERY_OPTION)
    texts["units"] = script("fsdp1", None, **EVERY_OPTION, sharding={"wrap": "layer"})
    for name, (code, said) in run(texts).items():
        assert code == 0 and "off by" not in said, (name, said)


def test_a_users_function_runs_without_zerocheck(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USERS)
    texts = {name: script(f"{tmp_path}/mine.py:{name}", model=MLP) for name in ("sums", "right")}
    shown = run(texts)
    assert shown["sums"][0] == 1 and "off by 2.0e+00" in shown["sums"][1]
    assert shown["right"][0] == 0, shown["right"]


def test_a_script_is_run_by_itself(python: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script("ddp+rank-left-out"))
    done = subprocess.run(
        [str(python), "-I", str(tmp_path / "script.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "step 0, rank 0, gradient of " in done.stdout and "Traceback" not in done.stderr
    seen = [str(python), "-I", "-c", "import zerocheck"]
    assert subprocess.run(seen, cwd=tmp_path, capture_output=True, check=False).returncode == 1
    assert sys.prefix != str(python.parent.parent)


def test_another_error_is_not_the_crash(run: Run) -> None:
    issue = next(issue for issue in ours() if issue.fingerprint == "ddp / crashed / RuntimeError")
    text = script_of(known(issue)).replace("static_graph=True", "no_such_option=True")
    code, said = run({"": text})[""]
    assert code == 1 and "Traceback" in said and "no_such_option" in said
    assert case_file("ddp").status == "violated"
