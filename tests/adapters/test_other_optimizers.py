"""Implementations with the optimizers of torch that have no tests of their own here."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

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
from zerocheck.case.validity import check
from zerocheck.contract.loading import load
from zerocheck.errors import UsageError
from zerocheck.protocol.verdicts import EQUIVALENCE, MEMORY, RESUME
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial

from .holding import holds

OWN_TESTS = ("adamw", "sgd", "muon", "user")
KINDS: tuple[OptimizerKind, ...] = tuple(
    kind for kind in get_args(OptimizerKind) if kind not in OWN_TESTS
)
SHARDED = ("ddp", "fsdp1", "fsdp2", "zero-redundancy", "zero1", "zero3")
OF_WHOLES = ("ddp", "zero-redundancy", "zero1", "zero3")
"""Implementations in which some rank has each parameter whole."""
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


@pytest.mark.every(8)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_hold(pool: Pool, kind: OptimizerKind) -> None:
    # Every implementation with some kind, and every kind with some implementations.
    first = KINDS.index(kind) % 2
    for name in OF_WHOLES if kind == "adafactor" else SHARDED[first::2]:
        for start in (0, 3):
            assert holds(pool, name, _case(kind, start=start)).statuses["update"] == "holds"


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", ["nadam", "asgd", "rprop", "adagrad"])
@pytest.mark.parametrize("name", ["fsdp2", "zero2"])
def test_states_are_resumed(pool: Pool, name: str, kind: OptimizerKind) -> None:
    case = _case(kind, resumed=True)
    if (name, kind) == ("fsdp2", "rprop"):
        outcome = Trial(pool, name, case, obligations=RESUME).outcome()
        assert outcome.status == "unsupported"
        assert "torch refuses Rprop of DTensors: Operator aten._foreach" in outcome.reason
        return
    assert holds(pool, name, case, RESUME).statuses["roundtrip"] == "holds"


@pytest.mark.every(2)
@pytest.mark.parametrize("name", OF_WHOLES)
def test_factored_states_are_resumed_and_have_the_bytes_of_the_layout(
    pool: Pool, name: str
) -> None:
    holds(pool, name, _case("adafactor", resumed=True), RESUME)
    holds(pool, name, _case("adafactor", start=0), MEMORY)


def test_adafactor_of_shards_is_refused() -> None:
    for name in ("fsdp1", "deepspeed3"):
        assert load(name).supports(_case("adafactor")) == (
            "updates flat shards, and Adafactor needs whole matrices"
        )
    reason = load("fsdp2").supports(_case("adafactor"))
    assert reason is not None and "torch refuses Adafactor of DTensors" in reason


@pytest.mark.parametrize("foreach", [False, True])
def test_torch_refuses_adafactor_of_dtensors(foreach: bool) -> None:
    """Where this fails, torch has learned it, and FSDP2 need not refuse it any more."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        held = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]))
        held.grad = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match="in-place operations that require placement"):
            torch.optim.Adafactor([held], foreach=foreach).step()
    finally:
        dist.destroy_process_group()


def test_parameters_without_elements_are_refused() -> None:
    case = _case("adafactor")
    block = Block(kind="mlp", empty=True)
    empty = msgspec.structs.replace(case, model=Model(width=8, blocks=(block,)))
    with pytest.raises(UsageError, match="'adafactor', and torch's divides by the number of"):
        check(empty)


@pytest.mark.every(12)
@pytest.mark.parametrize("kind", ["adagrad", "nadam", "rmsprop"])
@pytest.mark.parametrize("name", ["ddp", "zero2", "fsdp2", "zero-redundancy"])
def test_bytes_are_those_of_the_layout(pool: Pool, name: str, kind: OptimizerKind) -> None:
    """Adagrad makes its states with the optimizer, and NAdam has one number more."""
    holds(pool, name, _case(kind, start=0), MEMORY)


def test_what_refuses_it() -> None:
    reason = one_of(_case("rmsprop"), "adamw", "sgd", "adam")
    assert reason == "is checked with AdamW, SGD and Adam, and not with RMSprop"
    assert one_of(Case(), "sgd", "adamw") is None


def test_a_users_rmsprop(pool: Pool) -> None:
    holds(pool, f"{SUBJECTS}:right", _case("rmsprop"))
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
    if kind == "adam":
        holds(pool, "fsdp2", fused)
        return
    outcome = Trial(pool, "fsdp2", fused, obligations=EQUIVALENCE).outcome()
    assert outcome.status == "unsupported", outcome.title
    assert "torch refuses Adagrad of DTensors: Operator aten._fused_adagrad_" in outcome.reason
