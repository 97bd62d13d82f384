"""Every built-in implementation takes the steps of SGD rightly, and resumes them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
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

from .holding import holds

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


@pytest.mark.every(4)
@pytest.mark.parametrize("name", NAMES)
def test_steps_hold(pool: Pool, name: str) -> None:
    for momentum, nesterov, kernel in sliced(FORMS, FORMS[NAMES.index(name) % 3 :: 3]):
        for start in (0, 3):
            case = _case(momentum, kernel, nesterov=nesterov, start=start)
            # Bytes and collectives are those of the form, wherever it starts.
            asked = EQUIVALENCE if start else (*EQUIVALENCE, *MEMORY)
            if (name, kernel) == ("fsdp2", "fused"):
                reason = Trial(pool, name, case, obligations=asked).outcome().reason
                assert "no sharding strategy for the fused kernel of SGD" in reason
                continue
            statuses = holds(pool, name, case, asked).statuses
            assert statuses["update"] == statuses["gradient"] == "holds"


@pytest.mark.every(4)
@pytest.mark.parametrize("name", NAMES)
def test_momentum_is_resumed(pool: Pool, name: str) -> None:
    case = replace(
        _case(0.9, "foreach", nesterov=True, start=3), resume=(TrainingSegment(mesh=(2,)),)
    )
    statuses = holds(pool, name, case, RESUME).statuses
    assert {statuses[one] for one in ("export", "roundtrip", "continuation")} == {"holds"}
