"""Implementations with Muon take its steps rightly, resume them, and others refuse it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from slices import sliced

from zerocheck import causes as bugs
from zerocheck.case.schema import (
    AdjustmentKind,
    Block,
    Case,
    Group,
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

EXACT = ("ddp", "zero1", "zero2", "zero3", "fsdp2-muon")
"""Implementations that multiply whole matrices by the kernels of one device."""
REFUSES = ("fsdp1", "fsdp1-grad-op", "fsdp1-no-shard", "zero-redundancy")
GROUPS = (Group(pattern="*.bias", lr=1e-2, weight_decay=0.0), Group(weight_decay=0.1))
FORMS: tuple[tuple[bool, AdjustmentKind, tuple[str, ...]], ...] = (
    (True, "original", ("stem.*", "head.*")),
    (False, "match_rms_adamw", ()),
)


def _case(
    nesterov: bool, adjustment: AdjustmentKind, fallback: tuple[str, ...], *, start: int = 0
) -> Case:
    return Case(
        mesh=(3,),
        model=Model(width=8, blocks=(Block(kind="mlp"), Block(kind="attention"))),
        optimizer=Optimizer(
            kind="muon",
            momentum=0.95,
            nesterov=nesterov,
            adjustment=adjustment,
            fallback=fallback,
            groups=GROUPS,
        ),
        start=Start(step=start, moments="typical" if start else "zero"),
        training=Training(steps=2, microbatches=2, clip=0.1 if start else None),
    )


@pytest.mark.every(8)
@pytest.mark.parametrize("name", [*EXACT, "fsdp2"])
def test_steps_hold(pool: Pool, name: str) -> None:
    for form in sliced(FORMS, FORMS[:1] if name == "fsdp2" else FORMS):  # round-off is estimated
        for start in (0, 3):
            # Bytes and collectives are those of the form, wherever it starts.
            asked = EQUIVALENCE if start else (*EQUIVALENCE, *MEMORY)
            outcome = Trial(pool, name, _case(*form, start=start), obligations=asked).outcome()
            if name == "fsdp2" and outcome.status == "unsupported":
                assert "torch refuses Muon of DTensors: aten.add_.Tensor" in outcome.reason
                continue
            wrong = outcome.judgement.violations if outcome.judgement else outcome.reason
            assert outcome.status == "holds", (form, start, wrong)
            assert outcome.judgement is not None
            assert outcome.judgement.statuses["update"] == "holds"
            assert ("update" in outcome.judgement.estimated) == (name == "fsdp2")


@pytest.mark.every(2)
@pytest.mark.parametrize("name", EXACT)
def test_momentum_is_resumed(pool: Pool, name: str) -> None:
    case = replace(_case(*FORMS[0], start=3), resume=(TrainingSegment(mesh=(2,)),))
    statuses = holds(pool, name, case, RESUME).statuses
    assert {statuses[one] for one in ("export", "roundtrip", "continuation")} == {"holds"}


@pytest.mark.parametrize("name", REFUSES)
def test_what_refuses_it(pool: Pool, name: str) -> None:
    outcome = Trial(pool, name, _case(*FORMS[0])).outcome()
    assert outcome.status == "unsupported"
    assert "Muon with AdamW" in outcome.reason


SUBJECTS = Path(__file__).parent / "muon_subjects.py"


@pytest.mark.long
def test_a_users_own_muon(pool: Pool) -> None:
    for form in FORMS:
        holds(pool, f"{SUBJECTS}:whole", _case(*form, start=3))
        wrong = Trial(pool, f"{SUBJECTS}:local", _case(*form, start=3)).outcome()
        assert wrong.judgement is not None
        violation = wrong.judgement.violations[0]
        assert violation.obligation == "update" and violation.role == "parameter"
        assert violation.causes[0] == bugs.ORTHOGONALIZED_BY_SHARD
        assert "orthogonalized shard by shard" in violation.attribution
