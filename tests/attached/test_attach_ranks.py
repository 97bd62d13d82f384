"""`attach` on real ranks: what is right holds, however it is sharded; a planted fault is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from asking import Ask, held
from click.testing import CliRunner

from zerocheck.cli import main


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "wrap", ["ddp", "compiled_ddp", "fsdp1", "flat_fsdp1", "unsharded_fsdp1", "fsdp2"]
)
def test_what_is_right_holds(ask: Ask, wrap: str) -> None:
    for answer in ask("steps", wrap=wrap):
        assert held(answer) == {"ownership", "clip", "update", "publish"}


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "given",
    [
        {"wrap": "plain", "ranks": 1},
        {"wrap": "hybrid_fsdp2", "ranks": 4, "count": 2},
        {"wrap": "fsdp2", "ranks": 3, "dtype": "bfloat16"},
        {"wrap": "fsdp2", "evaluates": True},
        {"wrap": "fsdp1", "evaluates": True},
        {"wrap": "ddp", "sharded": True},
        {"wrap": "ddp", "fused": True},
        {"wrap": "ddp", "foreach": False, "clip": False},
        {"wrap": "fsdp2", "amsgrad": True, "maximize": True},
    ],
    ids=str,
)
def test_ways_to_train_hold(ask: Ask, given: dict[str, Any]) -> None:
    for answer in ask("steps", **given):
        assert {"ownership", "update"} <= held(answer)
        assert 0 < answer["share"]["update"] < 1


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "given",
    [
        {"wrap": "ddp"},
        {"wrap": "ddp", "momentum": 0.9, "nesterov": True},
        {"wrap": "ddp", "momentum": 0.9, "fused": True},
        {"wrap": "ddp", "momentum": 0.9, "sharded": True},
        {"wrap": "ddp", "sharded": True},
        {"wrap": "fsdp1", "momentum": 0.9, "maximize": True},
        {"wrap": "flat_fsdp1", "momentum": 0.9, "foreach": False},
        {"wrap": "fsdp2", "momentum": 0.9, "nesterov": True},
        {"wrap": "fsdp2", "ranks": 3, "dtype": "bfloat16", "momentum": 0.5},
    ],
    ids=str,
)
def test_sgd_holds(ask: Ask, given: dict[str, Any]) -> None:
    for answer in ask("steps", sgd=True, **given):
        assert {"ownership", "update"} <= held(answer)
        assert 0 < answer["share"]["update"] < 1


def test_groups_frozen_and_unused(ask: Ask) -> None:
    for answer in ask("two_groups"):
        assert held(answer) == {"ownership", "update", "publish"}


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_may_skip(ask: Ask, fused: bool) -> None:
    for answer in ask("scaled", overflows=True, fused=fused):
        for step in answer["steps"]:
            assert {"update", "publish"} <= held(step)
        assert answer["scale"] == 2.0**9


def test_a_step_that_must_be_skipped(ask: Ask) -> None:
    answer = ask("scaled", overflows=True, unskipped=True)[0]["steps"][1]
    assert answer["violations"][0]["causes"] == ["step not skipped"]


def test_local_norm(ask: Ask) -> None:
    answer = ask("local_norm")[0]
    assert answer["violations"][0]["causes"] == ["local norm"]


# (sharding, fault, first step with it): (obligation, role, cause)
FAULTS = {
    ("ddp", "moment_scaled", 7): ("update", "exp_avg", ""),
    ("fsdp1", "moment_scaled", 7): ("update", "exp_avg", ""),
    ("fsdp2", "moment_scaled", 7): ("update", "exp_avg", ""),
    ("ddp", "decay_twice", 7): ("update", "parameter", "weight decay twice"),
    ("fsdp2", "decay_twice", 7): ("update", "parameter", "weight decay twice"),
    ("ddp", "stale_on_one_rank", 7): ("publish", "parameter", "never updated"),
    ("ddp", "stale_on_one_rank", 10): ("publish", "parameter", "copies of the previous step"),
    ("fsdp2", "stale_on_one_rank", 7): ("update", "parameter", "never updated"),
    ("ddp", "not_reduced", 7): ("gradient", "gradient", "copies of the gradient differ"),
    ("ddp", "parted_before", 7): ("publish", "parameter", "copies differ"),
    ("fsdp2", "frozen_moved", 7): ("update", "parameter", "untouched parameter changed"),
    ("fsdp2", "other_rate", 7): ("update", "step", "ranks disagree"),
    ("ddp", "skips_on_one_rank", 7): ("update", "step", "ranks disagree"),
}


@pytest.mark.every(2)
@pytest.mark.parametrize(("sharding", "fault", "begins"), FAULTS)
def test_a_fault_in_mid_run(
    ask: Ask, tmp_path: Path, sharding: str, fault: str, begins: int
) -> None:
    """Steps 1, 2, 3, 5, 10 and 15 are checked: the tenth stops the run."""
    obligation, role, cause = FAULTS[sharding, fault, begins]
    for answer in ask("train", sharding=sharding, steps=12, fault=fault, begins=begins, every=5):
        assert answer["raised"] == "Violated"
        assert answer["said"].startswith(f"step 10: {obligation}: ")
    bundle = tmp_path / "kept" / "step-10"
    done = CliRunner().invoke(main, ["replay", str(bundle)])
    assert done.exit_code == 1, done.output
    assert f"  obligation  {obligation}: " in done.output and f"role {role}" in done.output
    assert cause in done.output
    assert "reproduced: the same verdict on step 10" in done.output


@pytest.mark.parametrize("sharding", ["ddp", "fsdp1", "fsdp2"])
def test_the_same_script_without_a_fault(ask: Ask, tmp_path: Path, sharding: str) -> None:
    for answer in ask("train", sharding=sharding, steps=12, every=5):
        assert answer == {"taken": 12}
    assert not (tmp_path / "kept").exists()
