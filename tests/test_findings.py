"""The pages of the faults of the libraries: each has its script and its line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from slices import sliced

from zerocheck.run.known_issues.entries import ours
from zerocheck.run.known_issues.releases import Releases

FINDINGS = Path(__file__).parent.parent / "reports" / "findings"
INDEX = (FINDINGS / "README.md").read_text(encoding="utf-8")
ONLY = {
    "deepspeed": "torch and DeepSpeed only",
    "accelerate": "torch and accelerate only",
    "lightning": "torch, Lightning and DeepSpeed only",
}
NEEDS = {"deepspeed": ("deepspeed",), "lightning": ("lightning", "deepspeed")}
"""Packages that the scripts of a library need, where the tests may be without them."""
PAGES = sorted(path.name for path in FINDINGS.glob("*.md") if path.name != "README.md")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_its_script_and_its_line(name: str) -> None:
    text = (FINDINGS / name).read_text(encoding="utf-8")
    (script,) = re.findall(r"alone:\*\*\s`python (\w+\.py)`", text)
    assert (FINDINGS / script).is_file()
    only = ONLY.get(name.partition("-")[0].rstrip("0123"), "torch only")
    assert only in (FINDINGS / script).read_text(encoding="utf-8").splitlines()[0]
    (line,) = [line for line in INDEX.splitlines() if f"]({name})" in line]
    title = text.splitlines()[0].removeprefix("# ")
    assert line.startswith(f"| [{title}](")
    known = any(issue.page == f"reports/findings/{name}" for issue in ours())
    assert line.endswith("| yes |" if known else "|  |")


def test_every_script_has_a_page_in_the_index() -> None:
    answer = "".join((FINDINGS / name).read_text(encoding="utf-8") for name in PAGES)
    for path in FINDINGS.glob("*.py"):
        assert f"`python {path.name}`" in answer
    faults, traps = (re.findall(r"\]\(([\w-]+\.md)\) \|", part) for part in INDEX.split("## Traps"))
    assert sorted([*faults, *traps]) == PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_upstream_knows(name: str) -> None:
    text = (FINDINGS / name).read_text(encoding="utf-8")
    (upstream,) = re.findall(r"\*\*Upstream\.\*\* (.*?)(?:\n\n|\Z)", text, re.DOTALL)
    assert "was looked for" not in upstream
    if "NO_SHARD" in text.splitlines()[4]:
        assert "deprecated" in text


@pytest.mark.parametrize("name", sorted(path.name for path in FINDINGS.glob("*.py")))
def test_the_ranks_of_a_script_end_their_threads(name: str) -> None:
    # Else one that outlives the interpreter aborts it, now and then.
    text = (FINDINGS / name).read_text(encoding="utf-8")
    assert ("mp.spawn" in text) <= ("destroy_process_group" in text)


SCRIPTS = sorted(path.name for path in FINDINGS.glob("*.py"))
ON_GPUS = {name for name in SCRIPTS if "cuda.is_available" in (FINDINGS / name).read_text()}
OF_DEEPSPEED = find_spec("deepspeed") is not None
TRIED = sliced(
    [name for name in SCRIPTS if name not in ON_GPUS],
    [
        "accelerate_dropout_in_a_checkpoint.py",
        "accelerate_optimizer_of_fsdp1_not_loaded.py",
        "adamw_fused_on_cpu_ignores_strides.py",
        "fsdp1_accumulation_of_one_element.py",
        "fsdp2_uses_added_in_the_reduce_dtype.py",
    ],
)


RELEASES = Releases(
    {"torch": torch.__version__, "deepspeed": version("deepspeed") if OF_DEEPSPEED else ""}
)
OF_OTHER_RELEASES = {
    Path(issue.page).stem.replace("-", "_") + ".py"
    for issue in ours()
    if issue.page and not issue.known_in(RELEASES)
} - {
    Path(issue.page).stem.replace("-", "_") + ".py" for issue in ours() if issue.known_in(RELEASES)
}
"""Scripts of faults that the releases here do not have."""


@pytest.mark.every(6)
@pytest.mark.parametrize("name", TRIED)
def test_a_script_ends_with_1_while_its_fault_is_there(name: str) -> None:
    for package in NEEDS.get(name.partition("_")[0].rstrip("0123"), ()):
        pytest.importorskip(package)
    ended = subprocess.run(
        [sys.executable, name], cwd=FINDINGS, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == (0 if name in OF_OTHER_RELEASES else 1), ended.stdout + ended.stderr


@pytest.mark.every(4)
@pytest.mark.parametrize("name", sorted(ON_GPUS))
def test_a_script_for_gpus_ends_with_2_without_one(name: str) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, name], cwd=FINDINGS, capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 2 and "needs a GPU" in ended.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_with_2_where_anything_else_fails(name: str) -> None:
    """By a hook for what nobody catches; a fault is never said by such an exception."""
    text = (FINDINGS / name).read_text(encoding="utf-8")
    assert text.count("sys.excepthook = ") == 1 and "os._exit(2)" in text
    assert re.search(r"sys\.exit\(|os\._exit\(1\)", text)


def test_what_nobody_catches_ends_with_2(tmp_path: Path) -> None:
    (line,) = re.findall(
        r"^sys\.excepthook = .*$", (FINDINGS / SCRIPTS[0]).read_text(encoding="utf-8"), re.MULTILINE
    )
    script = tmp_path / "broken.py"
    script.write_text(f"import os, sys\n{line}\nassert False\n")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert ended.returncode == 2 and "AssertionError" in ended.stderr
