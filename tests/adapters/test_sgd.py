"""Every built-in implementation takes the steps of SGD rightly, and resumes them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from borrowing import borrowed
from slices import sliced

from zerocheck.case.schema import (
    Block,
    Case,
    Group,
    KernelKind,
    Model,
    Optimizer,
    Start,
    Training,
    TrainingSegment,
)
from zerocheck.protocol.verdicts import EQUIVALENCE, MEMORY, RESUME
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial

NAMES = (
    "ddp", "zero-redundancy", "fsdp1", "fsdp1-grad-op", "fsdp1-no-shard", "fsdp2",
    "zero1", "zero2", "zero3",
)  # fmt: skip
FORMS: tuple[tuple[float, bool, KernelKind], ...] = (
    (0.0, False, "foreach"),
    (0.0, False, "fused"),
    (0.9, False, "fused"),
    (0.9, True, "foreach"),
    (0.5, True, "for-loop"),
)
GROUPS = (Group(pattern="*.bias", lr=1e-2, weight_decay=0.0), Group(weight_decay=0.1))


def _case(momentum: float, kernel: KernelKind, *, nesterov: bool, start: int = 0) -> Case:
    options = Optimizer(
        kind="sgd",
        momentum=momentum,
        nesterov=nesterov,
        kernel=kernel,
        groups=GROUPS,
        maximize=start > 0,
    )
    return Case(
        mesh=(3,),
        model=Model(blocks=(Block(kind="mlp"),)),
        optimizer=options,
        start=Start(step=start, moments="typical" if start else "zero"),
        training=Training(steps=2, microbatches=2, clip=0.1 if start else None),
    )


@pytest.fixture(scope="module")
def pool(session_pool: Pool) -> Iterator[Pool]:
    with borrowed(session_pool, patience_s=2.0) as ranks:
        yield ranks


@pytest.mark.every(4)
@pytest.mark.parametrize("name", NAMES)
def test_steps_hold(pool: Pool, name: str) -> None:
    for momentum, nesterov, kernel in sliced(FORMS, FORMS[NAMES.index(name) % 3 :: 3]):
        for start in (0, 3):
            case = _case(momentum, kernel, nesterov=nesterov, start=start)
            # Bytes and collectives are those of the form, wherever it starts.
            asked = EQUIVALENCE if start else (*EQUIVALENCE, *MEMORY)
            outcome = Trial(pool, name, case, obligations=asked).outcome()
            wrong = outcome.judgement.violations if outcome.judgement else outcome.reason
            if (name, kernel) == ("fsdp2", "fused"):
                assert "no sharding strategy for the fused kernel of SGD" in outcome.reason
                continue
            assert outcome.status == "holds", (case, wrong)
            assert outcome.judgement is not None
            assert outcome.judgement.statuses["update"] == "holds"
            assert outcome.judgement.statuses["gradient"] == "holds"


@pytest.mark.every(4)
@pytest.mark.parametrize("name", NAMES)
def test_momentum_is_resumed(pool: Pool, name: str) -> None:
    whole = _case(0.9, "foreach", nesterov=True, start=3)
    case = Case(
        mesh=(3,),
        model=whole.model,
        optimizer=whole.optimizer,
        start=whole.start,
        training=whole.training,
        resume=(TrainingSegment(mesh=(2,)),),
    )
    outcome = Trial(pool, name, case, obligations=RESUME).outcome()
    wrong = outcome.judgement.violations if outcome.judgement else outcome.reason
    assert outcome.status == "holds", wrong
    assert outcome.judgement is not None
    for obligation in ("export", "roundtrip", "continuation"):
        assert outcome.judgement.statuses[obligation] == "holds", obligation
