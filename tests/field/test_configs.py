"""Keys of accelerate and transformers are those that they read; TrainingArguments in real runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from test_stacks import result

from zerocheck.adapters.accelerate.user_config.keys import DEEPSPEED, FSDP, TOP
from zerocheck.adapters.transformers.user_config.keys import FIELDS

OBLIGATIONS = ("--obligations", "equivalence,resume", "--world-sizes", "1,2,3")
CASES = ("--profile", "quick", "--max-cases", "30")


def test_keys_of_accelerate() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    fields = {field.name for field in dataclasses.fields(ClusterConfig)}
    assert fields | {"fp16", "dynamo_backend"} == {*TOP}
    options = {action.dest for action in launch_command_parser()._actions}
    # It has no option for it, and hands it on from a file all the same.
    assert {one for one in options if one.startswith("fsdp_")} == {*FSDP} - {"fsdp_ignored_modules"}
    assert {*DEEPSPEED} <= options


def test_fields_of_training_arguments() -> None:
    from transformers import TrainingArguments

    assert {field.name for field in dataclasses.fields(TrainingArguments)} == {*FIELDS}


HOLD: dict[str, dict[str, Any]] = {
    "ddp": {"gradient_accumulation_steps": 2},
    "ddp in bf16": {"bf16": True, "ddp_broadcast_buffers": False},
    "fsdp2": {"fsdp": True, "weight_decay": 0.1},
    "fsdp2, sharded checkpoints": {
        "fsdp": True,
        "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT", "reshard_after_forward": False},
    },
    "fsdp2 in bf16": {"fsdp": True, "bf16": True, "gradient_accumulation_steps": 3},
}


@pytest.mark.parametrize("which", HOLD)
def test_training_arguments_hold(which: str, tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"output_dir": "out", **HOLD[which]}))
    done = result(tmp_path / "report", str(path), *CASES, *OBLIGATIONS)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


def test_moments_that_fsdp1_loses_are_found(tmp_path: Path) -> None:
    """Sharded checkpoints of FSDP1, as accelerate 1.15.0 loads them into a new optimizer."""
    path = tmp_path / "args.json"
    fsdp = {"version": 1, "state_dict_type": "SHARDED_STATE_DICT"}
    path.write_text(json.dumps({"output_dir": "out", "fsdp": True, "fsdp_config": fsdp}))
    done = result(tmp_path / "report", str(path), *CASES, "--obligations", "roundtrip")
    assert done.returncode == 1
    assert "the optimizer's states and step count are 0" in done.stdout
