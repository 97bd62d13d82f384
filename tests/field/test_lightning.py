"""Configs and strategies of Lightning in real runs, and keys that are those that it reads."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from test_stacks import result

from zerocheck.adapters.lightning.user_config.keys import DDP, DEEPSPEED, FSDP, TRAINER
from zerocheck.adapters.lightning.user_config.strategy import NAMES, OTHERS

OBLIGATIONS = ("--obligations", "equivalence,resume", "--world-sizes", "1,2,3")
CASES = ("--profile", "quick", "--max-cases", "30")
FEW = ("--profile", "quick", "--max-cases", "8", "--world-sizes", "2", "--no-shrink")


def arguments(*kinds: type) -> set[str]:
    names = {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}
    return names - {"self", "module", "kwargs"}


def test_keys_of_the_trainer_and_its_strategies() -> None:
    from lightning import Trainer
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    assert arguments(Trainer) == {*TRAINER}
    assert arguments(DDPStrategy, DistributedDataParallel) == {*DDP}
    assert arguments(FSDPStrategy, FullyShardedDataParallel) == {*FSDP}
    assert arguments(DeepSpeedStrategy) == {*DEEPSPEED}


def test_names_and_what_they_stand_for() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    registered = {*StrategyRegistry.available_strategies()}
    classes = {name for name in OTHERS if name[0].isupper()}
    assert registered == {*NAMES, *OTHERS} - {"auto"} - classes
    for name, (kind, given) in NAMES.items():
        if kind in ("fsdp", "deepspeed"):
            made = {**StrategyRegistry[name]["init_params"]}
            assert made == given, name


def strategy(name: str, **init_args: Any) -> dict[str, Any]:
    return {"strategy": {"class_path": name, "init_args": init_args}}


HOLD: dict[str, dict[str, Any]] = {
    "auto": {"accumulate_grad_batches": 2},
    "ddp by its name": {
        "strategy": "ddp_find_unused_parameters_true",
        "gradient_clip_val": 1.0,
        "precision": "bf16-mixed",
    },
    "ddp by its class": strategy("DDPStrategy", gradient_as_bucket_view=True, bucket_cap_mb=1),
    "fsdp": strategy("FSDPStrategy", auto_wrap_policy=["my.Block"], state_dict_type="sharded"),
    "fsdp in bf16": {
        **strategy("FSDPStrategy", auto_wrap_policy=["my.Block"], state_dict_type="sharded"),
        "accumulate_grad_batches": 2,
        "precision": "bf16-mixed",
    },
    "fsdp, flat": strategy(
        "FSDPStrategy",
        use_orig_params=False,
        sharding_strategy="SHARD_GRAD_OP",
        activation_checkpointing_policy=["my.Block"],
        state_dict_type="sharded",
    ),
}


@pytest.mark.parametrize("which", HOLD)
def test_a_right_config_holds(which: str, tmp_path: Path) -> None:
    path = tmp_path / "trainer.yaml"
    path.write_text(json.dumps({"trainer": HOLD[which]}))
    done = result(tmp_path / "report", str(path), *CASES, *OBLIGATIONS)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


@pytest.mark.parametrize(
    ("name", "obligations"),
    [("ddp", "equivalence,roundtrip,continuation"), ("fsdp", "equivalence,continuation")],
)
def test_a_right_strategy_holds(name: str, obligations: str, tmp_path: Path) -> None:
    """Without obligations in which torch has listed faults: an object is code of the user's own."""
    asked = ("--world-sizes", "1,2,3", "--obligations", obligations)
    done = result(tmp_path, f"lightning_strategies.py:{name}", *CASES, *asked)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("scaled", (), "gradient x W"),
        ("forgetful", ("--obligations", "roundtrip"), "the optimizer's states and step count are"),
    ],
)
def test_a_fault_of_a_strategy_is_found(
    name: str, more: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    done = result(tmp_path, f"lightning_strategies.py:{name}", *FEW, *more)
    assert done.returncode == 1 and words in done.stdout, done.stdout[-4000:] + done.stderr


def test_a_fault_in_the_collectives_of_a_config_is_found(tmp_path: Path) -> None:
    path = tmp_path / "trainer.yaml"
    path.write_text("trainer:\n  strategy: ddp_find_unused_parameters_true\n")
    done = result(tmp_path / "report", f"{path}+average-becomes-sum", *FEW)
    assert done.returncode == 1 and "gradient x W" in done.stdout, done.stdout[-4000:]


def test_full_checkpoints_of_fsdp_are_not_checked_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "trainer.yaml"
    path.write_text("trainer:\n  strategy: fsdp\n")
    done = result(tmp_path / "report", str(path), *FEW)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    asked = result(tmp_path / "again", str(path), *FEW, "--obligations", "equivalence,resume")
    assert "is of freed memory on the CPU" in asked.stdout


def test_a_strategy_that_is_refused() -> None:
    done = result(Path("never-written"), "lightning_strategies.py:parallel", *FEW)
    assert done.returncode == 2
    assert "it shards nothing itself, the model's configure_model() does" in done.stderr
