"""Implementations with the optimizers of torch that have no tests of their own here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from borrowing import borrowed

from zerocheck import causes as bugs
from zerocheck.adapters.shared.limits import one_of
from zerocheck.case.schema import (
    Block,
    Case,
    Group,
    Model,
    Optimizer,
    OptimizerKind,
    Start,
    Training,
    TrainingSegment,
)
from zerocheck.protocol.verdicts import EQUIVALENCE, MEMORY, RESUME
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial

OWN_TESTS = ("adamw", "sgd", "muon", "user")
KINDS: tuple[OptimizerKind, ...] = tuple(
    kind for kind in get_args(OptimizerKind) if kind not in OWN_TESTS
)
SHARDED = ("ddp", "fsdp1", "fsdp2", "zero-redundancy", "zero1", "zero3")
SUBJECTS = Path(__file__).parent / "optimizer_subjects.py"
GROUPS = (Group(pattern="*.bias", lr=1e-2, weight_decay=0.0), Group(weight_decay=0.1))


def _case(kind: OptimizerKind, *, start: int = 3, resumed: bool = False) -> Case:
    return Case(
        mesh=(3,),
        model=Model(width=8, blocks=(Block(kind="mlp"),)),
        optimizer=Optimizer(kind=kind, groups=GROUPS),
        start=Start(step=start, moments="typical" if start else "zero"),
        training=Training(steps=2, microbatches=2, clip=0.1),
        resume=(TrainingSegment(mesh=(2,)),) if resumed else (),
    )


@pytest.fixture(scope="module")
def pool(session_pool: Pool) -> Iterator[Pool]:
    with borrowed(session_pool, patience_s=2.0) as ranks:
        yield ranks


@pytest.mark.parametrize("kind", KINDS)
def test_steps_hold(pool: Pool, kind: OptimizerKind) -> None:
    # Every implementation with some kind, and every kind with some implementations.
    first = KINDS.index(kind) % 2
    for name in SHARDED[first::2]:
        for start in (0, 3):
            outcome = Trial(pool, name, _case(kind, start=start), obligations=EQUIVALENCE).outcome()
            wrong = outcome.judgement.violations if outcome.judgement else outcome.reason
            assert outcome.status == "holds", (name, start, wrong)
            assert outcome.judgement is not None
            assert outcome.judgement.statuses["update"] == "holds"


@pytest.mark.parametrize("kind", ["nadam", "asgd", "rprop", "adagrad"])
@pytest.mark.parametrize("name", ["fsdp2", "zero2"])
def test_states_are_resumed(pool: Pool, name: str, kind: OptimizerKind) -> None:
    outcome = Trial(pool, name, _case(kind, resumed=True), obligations=RESUME).outcome()
    if (name, kind) == ("fsdp2", "rprop"):
        assert outcome.status == "unsupported"
        assert "torch refuses Rprop of DTensors: Operator aten._foreach" in outcome.reason
        return
    wrong = outcome.judgement.violations if outcome.judgement else outcome.reason
    assert outcome.status == "holds", wrong
    assert outcome.judgement is not None
    assert outcome.judgement.statuses["roundtrip"] == "holds"


@pytest.mark.parametrize("kind", ["adagrad", "nadam", "rmsprop"])
@pytest.mark.parametrize("name", ["ddp", "zero2", "fsdp2", "zero-redundancy"])
def test_bytes_are_those_of_the_layout(pool: Pool, name: str, kind: OptimizerKind) -> None:
    """Adagrad makes its states with the optimizer, and NAdam has one number more."""
    case = _case(kind, start=0)
    outcome = Trial(pool, name, case, obligations=MEMORY).outcome()
    wrong = outcome.judgement.violations if outcome.judgement else outcome.reason
    assert outcome.status == "holds", wrong


def test_what_refuses_it() -> None:
    reason = one_of(_case("rmsprop"), "adamw", "sgd", "adam")
    assert reason == "is checked with AdamW, SGD and Adam, and not with RMSprop"
    assert one_of(Case(), "sgd", "adamw") is None


def test_a_users_rmsprop(pool: Pool) -> None:
    right = Trial(pool, f"{SUBJECTS}:right", _case("rmsprop")).outcome()
    assert right.status == "holds", right.judgement
    outcome = Trial(pool, f"{SUBJECTS}:state_lost", _case("rmsprop")).outcome()
    assert outcome.judgement is not None
    first = outcome.judgement.violations[0]
    assert (first.obligation, first.causes) == ("update", (bugs.MOMENTS_RESET,))


@pytest.mark.parametrize("kind", ["adagrad", "adam"])
def test_fused_kernels_of_shards(pool: Pool, kind: OptimizerKind) -> None:
    """torch has a rule of DTensors for fused Adam, and none for fused Adagrad."""
    case = _case(kind)
    fused = msgspec.structs.replace(
        case, optimizer=msgspec.structs.replace(case.optimizer, kernel="fused")
    )
    outcome = Trial(pool, "fsdp2", fused, obligations=EQUIVALENCE).outcome()
    if kind == "adam":
        assert outcome.status == "holds", outcome.reason
        return
    assert outcome.status == "unsupported", outcome.title
    assert "torch refuses Adagrad of DTensors: Operator aten._fused_adagrad_" in outcome.reason
