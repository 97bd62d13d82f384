"""What the README says can be done, can be done."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import example
from torch.distributed.run import config_from_args, parse_args

import zerocheck
from zerocheck.cli import main as program
from zerocheck.protocol.verdicts import OBLIGATIONS
from zerocheck.run.known_issues.entries import read
from zerocheck.run.plan.run_shard import RunShard

ROOT = Path(__file__).parent.parent
CHECKED = (ROOT / "docs" / "what-is-checked.md").read_text(encoding="utf-8")
DOCUMENTS = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))


def test_the_first_example_is_short() -> None:
    assert len(example("my_sharding.py").splitlines()) <= 15


def test_the_training_script_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(example("train.py"))
    path = [str(Path(zerocheck.__file__).parent.parent), str(ROOT / "reference")]
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={
            "PYTHONPATH": ":".join(path),
            **{"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("zerocheck: ")]
    (line,) = lines
    assert "3 of 10 steps checked, all hold (ownership, clip, update), at most" in line


def test_the_known_issue_of_the_example_is_read(tmp_path: Path) -> None:
    (tmp_path / "known.toml").write_text(example("known.toml"))
    (issue,) = read(tmp_path / "known.toml")
    assert issue.implementation == "my_sharding.py:my_fsdp" and issue.case is not None


def test_every_obligation_is_described() -> None:
    described = re.findall(r"(?m)^\| ([\w-]+) \|", CHECKED)
    assert [name for name in described if name in OBLIGATIONS] == sorted(
        OBLIGATIONS, key=described.index
    )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_documents_name_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (path.parent / link).exists(), link
    for command in re.findall(r"`(?:\S*/)?zerocheck (\w+)", text):
        assert command in program.commands, command
    for option in re.findall(r"(?m)zerocheck run [^`\n]*?(--[a-z-]+)", text):
        assert option in {o for p in program.commands["run"].params for o in p.opts}, option


def test_the_array_of_slurm_takes_each_shard_once(tmp_path: Path) -> None:
    """With a stand-in for zerocheck; the second script takes the journals of the first."""
    text = (ROOT / "docs" / "gpu-nodes.md").read_text(encoding="utf-8")
    _, array, together = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    first, last = map(int, re.findall(r"--array=(\d+)-(\d+)\n", array)[0])
    (tmp_path / "zerocheck").write_text('#!/bin/sh\nprintf "%s\\n" "$*"\n')
    (tmp_path / "zerocheck").chmod(0o755)

    def given(script: str, **slurm: int) -> dict[str, object]:
        ran = subprocess.run(
            ["bash", "-c", script],
            env={f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in slurm.items()}
            | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
            check=True,
            capture_output=True,
            text=True,
        )
        name, *rest = ran.stdout.split()
        return program.commands[name].make_context(name, rest).params

    tasks = [given(array, ID=number, COUNT=last) for number in range(first, last + 1)]
    shards = [RunShard.parse(str(one["shard"])) for one in tasks]
    assert shards == [RunShard(number, last) for number in range(1, last + 1)]
    merged = given(together)
    assert merged["reuse"] == (Path("shards"),) and merged["shard"] is None
    assert {one["report_dir"] for one in tasks} == {Path(f"shards/{one}") for one in range(1, 9)}
    for same in ("implementations", "profile"):
        assert {merged[same]} == {one[same] for one in tasks}


def test_the_slurm_script_starts_zerocheck(tmp_path: Path) -> None:
    """With stand-ins for Slurm and torchrun, down to options that zerocheck takes."""
    text = (ROOT / "docs" / "gpu-nodes.md").read_text(encoding="utf-8")
    found = re.search(r"```bash\n(.*?)```", text, re.DOTALL)
    assert found is not None
    (tmp_path / "job.sh").write_text(found.group(1))
    for name, does in {
        "scontrol": "printf 'node-1\\nnode-2\\n'",
        "srun": 'shift; exec "$@"',
        "torchrun": 'printf "%s\\n" "$@" > arguments',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"JOB_NODELIST": "node-[1-2]", "JOB_NUM_NODES": "2", "JOB_ID": "77"}
    subprocess.run(
        ["bash", "job.sh"],
        cwd=tmp_path,
        env={f"SLURM_{name}": value for name, value in slurm.items()}
        | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=True,
    )
    given = (tmp_path / "arguments").read_text().split()
    config, module, arguments = config_from_args(parse_args(given))
    assert module == sys.executable and arguments[:3] == ["-u", "-m", "zerocheck"]
    assert (config.min_nodes, config.nproc_per_node) == (2, 4)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "node-1:29400")
    assert arguments[3] == "run"
    options = program.commands["run"].make_context("run", list(arguments[4:])).params
    assert options["implementations"] == ("my_sharding.py:my_fsdp",)
    assert options["report_dir"] == Path("report-77") and options["profile"] == "ci"
