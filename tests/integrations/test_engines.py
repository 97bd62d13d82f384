"""Engines of DeepSpeed, checked step by step: right ones hold, and each fault is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from borrowing import Ask, answers
from click.testing import CliRunner
from torch import nn

import zerocheck
from zerocheck.attached.saves.in_files import examined
from zerocheck.cli import main
from zerocheck.errors import UsageError
from zerocheck.ranks import Pool

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

sys.path.insert(0, os.path.dirname(__file__))

ALL = {"ownership", "gradient", "update", "publish"}


@pytest.fixture(scope="module")
def engine_pool() -> Iterator[Pool]:
    with Pool("engine_targets:run", patience_s=60.0) as pool:
        yield pool


@pytest.fixture
def train(engine_pool: Pool, tmp_path: Path) -> Ask:
    """Train on so many ranks; what each returned."""

    def run(stage: int, ranks: int = 2, **given: Any) -> list[dict[str, Any]]:
        return answers(engine_pool, ranks, stage=stage, directory=str(tmp_path), **given)

    return run


def holding(answer: dict[str, Any]) -> set[str]:
    assert answer["wrong"] == 0, answer
    return {name for name, status in answer["statuses"].items() if status == "holds"}


SHARDED: dict[str, Any] = {"stage3_param_persistence_threshold": 0, "sub_group_size": 60}


@pytest.mark.every(9)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_right_engines_hold(train: Ask, stage: int, ranks: int) -> None:
    """Two groups, a frozen parameter, clipping; stage 3 in several partitions of each group."""
    zero = SHARDED if stage == 3 else {}
    for answer in train(stage, ranks, groups=True, frozen=True, clip=0.05, zero=zero):
        assert holding(answer) >= ALL | {"clip"} and answer["taken"] == 4, answer
        assert "3 of 4 steps checked, all hold" in answer["summary"]


VARIANTS: dict[str, dict[str, Any]] = {
    "offloaded": {"groups": True, "clip": 0.05, "zero": {"offload_optimizer": {"device": "cpu"}}},
    "not clipped": {},
    "gathered": {"zero": {"stage3_param_persistence_threshold": 100}},
    "gathered and frozen": {"frozen": True},
}


@pytest.mark.every(4)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stage", [2, 3])
def test_variants_hold(train: Ask, stage: int, variant: str) -> None:
    for answer in train(stage, **VARIANTS[variant]):
        assert holding(answer) >= ALL


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_bf16_the_masters_are_judged(train: Ask, stage: int) -> None:
    for answer in train(stage, bf16=True, zero=SHARDED if stage == 3 else {}):
        assert holding(answer) >= ALL - {"gradient"}
        assert answer["unjudged"] == {
            "gradient": "the engine computes in another dtype than its masters have"
        }


# (stage, fault): (first obligation, words of the finding)
FAULTS: dict[tuple[int, str], tuple[str, str]] = {
    (1, "stale"): ("publish", "copies of the previous step"),
    (2, "stale"): ("publish", "copies of the previous step"),
    (2, "drift"): ("publish", "before the step, the parameters that the forward uses are not"),
    (3, "drift"): ("publish", "before the step, the parameters that the forward uses are not"),
    (1, "decay twice"): ("update", "weight decay twice"),
    (3, "decay twice"): ("update", "weight decay twice"),
    (2, "clipped twice"): ("clip", "clip"),
    (3, "clipped twice"): ("clip", "clip"),
    (2, "reduction"): ("gradient", "gradient"),
    (1, "no optimizer"): ("update", "4.bias was not updated: no optimizer has it"),
    (2, "no optimizer"): ("update", "4.bias was not updated: no optimizer has it"),
    (3, "no optimizer"): ("update", "4.bias was not updated: no optimizer has it"),
}


@pytest.mark.every(2)
@pytest.mark.parametrize(("stage", "fault"), FAULTS)
def test_each_fault_is_named(train: Ask, tmp_path: Path, stage: int, fault: str) -> None:
    obligation, words = FAULTS[stage, fault]
    clip = 0.01 if fault == "clipped twice" else 0.0
    answers = train(stage, fault=fault, clip=clip, count=2)
    message = answers[0]["message"]
    assert f"  obligation  {obligation}: " in message, message
    assert words in message, message
    assert message.index(f"obligation  {obligation}") == message.index("obligation ")
    done = CliRunner().invoke(main, ["replay", str(tmp_path / "step-1")])
    assert "the same verdict on step 1" in done.output, done.output


def test_the_first_wrong_step_is_found(train: Ask) -> None:
    """Step 3 is checked, and step 1 is kept by the flight recorder."""
    answers = train(2, fault="stale", count=3, recorder="64MiB", every=3, steps=())
    assert all(one["wrong"] == 1 for one in answers)
    assert "first step  1 is the first wrong one; found as step 3 was" in answers[0]["message"]


def test_where_a_part_is_wrong(train: Ask) -> None:
    """Rank 1 has elements [33, 66) of the first weight; of its masters three are others."""
    message = train(3, fault="drift", zero=SHARDED)[0]["message"]
    found = re.search(r"of 0\.weight elements in \[(\d+), (\d+)\) differ", message)
    assert found is not None, message
    assert 33 == int(found[1]) < 36 <= int(found[2]) <= 38


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_checkpoints_get_a_record(train: Ask, tmp_path: Path, stage: int, bf16: bool) -> None:
    """The engine trains on after it, and what it loads is the state of then."""
    zero = SHARDED if stage == 3 else {}
    for answer in train(stage, 3, saves=True, groups=True, frozen=True, bf16=bf16, zero=zero):
        assert answer["wrong"] == 0 and answer["taken"] == 2
        assert "0 of 1 loads wrong" in answer["summary"]
    assert said_of(tmp_path / "saved") == []


def said_of(path: Path) -> list[str]:
    """Findings of `zerocheck checkpoint` in a folder with a record."""
    report = examined(path)
    assert "recorded" in report.checked and "after ds_to_universal.py" in report.loads
    return [f"{one.check} {one.where}: {one.detail}" for one in report.findings]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_wrong_partition_is_named(train: Ask, tmp_path: Path, stage: int) -> None:
    train(stage, saves=True, groups=True, frozen=True)
    (file,) = tmp_path.glob("saved/global_step2/*rank_1_*_optim_states.pt")
    tree = torch.load(file, weights_only=False)
    state = tree["optimizer_state_dict"]
    inner = state.get("optimizer_state_dict") or state["base_optimizer_state"]
    inner["state"][0]["exp_avg"][:2] = 0
    torch.save(tree, file)
    (said,) = said_of(tmp_path / "saved")
    assert "recorded exp_avg: exp_avg of 0.weight is what was saved in part only" in said
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    (said,) = said_of(tmp_path / "saved")
    assert said.startswith(f"readable {file.name}: ")
    file.unlink()
    (said,) = said_of(tmp_path / "saved")
    assert said == f"files {file.name}: it is missing, with the partitions of its rank"
    if stage == 3:
        model = file.with_name(file.name.replace("optim", "model"))
        model.unlink()
        assert f"files {model.name}: it is missing" in "".join(said_of(tmp_path / "saved"))


@pytest.mark.long
def test_a_loop_as_users_write_it(tmp_path: Path) -> None:
    """The program whose figures stand in reports/integrations, with a fault in its step 5."""
    field = Path(__file__).parents[1] / "field"
    package = Path(zerocheck.__file__).parents[1]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
            *("2", str(field / "engine_loop.py"), "--steps", "6", "--every", "3"),
            *("--recorder", "64MiB", "--begin", "5", "--fault", "not reduced"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{package}:{package / 'reference'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "first step  5 is the first wrong one: step 4 was recorded and hold" in done.stderr
    assert "local gradient only" in done.stdout, done.stdout


@pytest.mark.parametrize("stage", [0, 2])
def test_an_optimizer_that_is_not_judged(train: Ask, stage: int) -> None:
    """One sentence, and the training goes on without checks."""
    answers = train(stage, name="NAdam")
    for answer in answers:
        assert (answer["wrong"], answer["taken"], answer["statuses"]) == (0, 4, {})
    said = answers[0]["message"]
    assert said.count("got NAdam") == 1 and "the training goes on" in said, said


def test_what_is_no_engine() -> None:
    from zerocheck.integrations.deepspeed import check

    with pytest.raises(UsageError, match="check is given a Linear"):
        check(nn.Linear(2, 1))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="did you mean 'reference'"):
        check(nn.Linear(2, 1), refrence=None)  # type: ignore[arg-type]
