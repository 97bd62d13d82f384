"""Configs of accelerate in real runs: right ones hold, and what is wrong with them is found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from zerocheck.adapters.accelerate.user_config import read
from zerocheck.case.codec import merged
from zerocheck.case.schema import Block, Case, Model, Training, TrainingSegment
from zerocheck.catalogue import family
from zerocheck.protocol.verdicts import EQUIVALENCE, RESUME
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial
from zerocheck.run.records.records import Outcome

from ..cases import CASES

pytest.importorskip("accelerate")

Write = Callable[[dict[str, Any]], str]

FSDP2 = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
FSDP1 = {"fsdp_version": 1, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
DROPOUT = msgspec.structs.replace(
    CASES["microbatches"],
    model=Model(inputs=4, width=6, blocks=(Block(kind="mlp", hidden=5, dropout=0.3),), outputs=3),
)


def sharded(fsdp: dict[str, Any], **top: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "fsdp_config": fsdp, **top}


HOLD: dict[str, tuple[dict[str, Any], str]] = {
    "ddp": ({"distributed_type": "MULTI_GPU"}, "groups"),
    "ddp, bf16": ({"distributed_type": "MULTI_CPU", "mixed_precision": "bf16"}, "microbatches"),
    "fsdp2": (sharded({**FSDP2, "fsdp_reshard_after_forward": False}), "microbatches"),
    "fsdp2, bf16": (sharded(FSDP2, mixed_precision="bf16"), "microbatches"),
    "fsdp2, by size": (
        sharded({"fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}),
        "clip",
    ),
    "fsdp1": (sharded({**FSDP1, "fsdp_backward_prefetch": "BACKWARD_PRE"}), "groups"),
    "fsdp1, bf16": (sharded(FSDP1, mixed_precision="bf16"), "microbatches"),
    "fsdp1, flat": (sharded({**FSDP1, "fsdp_use_orig_params": False}), "clip"),
    "fsdp1, kept": (sharded({**FSDP1, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}), "clip"),
}
"""Name -> a config, and the case by name."""


@pytest.fixture
def config(tmp_path: Path) -> Write:
    """A function from a config to the name of its file, which is YAML as JSON is."""

    def write(given: dict[str, Any]) -> str:
        path = tmp_path / "accelerate.yaml"
        path.write_text(json.dumps(given))
        return str(path)

    return write


def judged(pool: Pool, name: str, case: Case, obligations: Any = EQUIVALENCE) -> Outcome:
    """The case on three ranks, with what the config fixes."""
    file = next(one for one in family(name) if one.endswith(".yaml"))
    case = merged(msgspec.structs.replace(case, mesh=(3,)), read(file).fixed, source="it")
    return Trial(pool, name, case, obligations=obligations).outcome()


@pytest.mark.every(3)
@pytest.mark.parametrize("which", HOLD)
def test_a_right_config_holds(pool: Pool, config: Write, which: str) -> None:
    given, case = HOLD[which]
    outcome = judged(pool, config(given), CASES[case])
    assert outcome.status == "holds", outcome.reason or outcome.judgement
    assert not outcome.leaks


def test_its_code_is_that_of_torch(config: Write) -> None:
    name = config(sharded(FSDP2))
    assert family(f"{name}+gather-stale") == (f"{name}+gather-stale", name, "fsdp2")


def test_a_fault_in_its_collectives_is_found(pool: Pool, config: Write) -> None:
    name = f"{config(sharded(FSDP2))}+average-becomes-sum"
    outcome = judged(pool, name, CASES["microbatches"])
    assert outcome.status == "violated" and outcome.judgement is not None
    assert "gradient x W" in outcome.judgement.violations[0].causes


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("version", "causes"), [(FSDP2, ("dropout drawn again",)), (FSDP1, ())], ids=["2", "1"]
)
def test_dropout_in_a_checkpoint(
    pool: Pool, config: Write, version: dict[str, Any], causes: tuple[str, ...]
) -> None:
    """With FSDP2 accelerate 1.15.0 does not keep the random state, and with FSDP1 it does."""
    given = sharded({**version, "fsdp_activation_checkpointing": True})
    outcome = judged(pool, config(given), DROPOUT)
    assert outcome.judgement is not None
    found = {cause for one in outcome.judgement.violations for cause in one.causes}
    assert found == {*causes}


SAVED: dict[str, tuple[dict[str, Any], bool]] = {
    "ddp": ({"distributed_type": "MULTI_GPU"}, True),
    "fsdp2": (sharded(FSDP2), True),
    "fsdp2, full": (sharded({**FSDP2, "fsdp_state_dict_type": "FULL_STATE_DICT"}), True),
    "fsdp1, sharded": (sharded({**FSDP1, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}), False),
}
"""Name -> a config, and whether accelerate 1.15.0 loads what it saved."""


@pytest.mark.every(2)
@pytest.mark.parametrize("which", SAVED)
def test_what_it_saves_is_loaded_on_other_ranks(pool: Pool, config: Write, which: str) -> None:
    """With FSDP1 and sharded checkpoints the state of a new optimizer stays empty."""
    given, right = SAVED[which]
    case = msgspec.structs.replace(
        CASES["groups"], training=Training(steps=2, norm="2"), resume=(TrainingSegment(mesh=(2,)),)
    )
    outcome = judged(pool, config(given), case, RESUME)
    if right:
        assert outcome.status == "holds", outcome.reason or outcome.judgement
        return
    assert outcome.judgement is not None
    (first, *_) = outcome.judgement.violations
    assert first.obligation == "roundtrip"
    assert "the optimizer's states and step count are 0" in first.explanation


def test_what_takes_an_accelerator_is_not_run_without(pool: Pool, config: Write) -> None:
    case = msgspec.structs.replace(CASES["groups"], resume=(TrainingSegment(mesh=(2,)),))
    outcome = judged(pool, config(sharded(FSDP1)), case, RESUME)
    assert outcome.status == "unsupported"
    assert "is of freed memory on the CPU" in outcome.reason


def test_the_words_of_accelerate_are_the_verdict(pool: Pool, config: Write) -> None:
    """Checkpointing without units: accelerate 1.15.0 calls None."""
    given = sharded({"fsdp_version": 2, "fsdp_activation_checkpointing": True})
    outcome = judged(pool, config(given), CASES["groups"])
    assert outcome.status == "crashed" and "'NoneType' object is not callable" in outcome.reason


def test_nothing_stays_in_the_environment(config: Write) -> None:
    from zerocheck.adapters.accelerate.launch import environment_of

    before = dict(os.environ)
    made = environment_of(config(sharded(FSDP2, mixed_precision="bf16")), 4)
    assert made["FSDP_VERSION"] == "2" and made["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert dict(os.environ) == before
