"""Faults planted into DeepSpeed's engine are flagged and named; the engine without them is not."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import msgspec
import pytest
from borrowing import borrowed

from zerocheck.case.schema import (
    Block,
    Case,
    Data,
    Model,
    Precision,
    Start,
    Training,
    TrainingSegment,
)
from zerocheck.faults.fault import Fault
from zerocheck.faults.registry import OF_EXTRAS
from zerocheck.protocol.verdicts import EQUIVALENCE, RESUME
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial
from zerocheck.run.findings.consequences import independent

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed; tox has it"
)
CASE = Case(
    mesh=(3,),
    seed=3,
    model=Model(inputs=5, width=7, outputs=3, blocks=(Block(kind="mlp", hidden=5),)),
    data=Data(batch=3),
    training=Training(steps=2, microbatches=3),
)


@pytest.fixture(scope="module")
def pool(deepspeed_pool: Pool) -> Iterator[Pool]:
    with borrowed(deepspeed_pool, patience_s=10.0) as ranks:
        yield ranks


@pytest.mark.every(4)
@pytest.mark.parametrize("fault", OF_EXTRAS.values(), ids=lambda fault: fault.name)
def test_it_is_flagged_and_named(pool: Pool, fault: Fault) -> None:
    resumes = "resume" in fault.features
    case = msgspec.structs.replace(CASE, resume=(TrainingSegment(mesh=(3,)),)) if resumes else CASE
    if "compute-bf16" in fault.features:
        reduce = "fp32" if "reduce-wide" in fault.features else "bf16"
        lowered = Precision(compute="bf16", reduce=reduce)
        case = msgspec.structs.replace(case, precision=lowered, start=Start(step=3))
    obligations = RESUME if resumes else EQUIVALENCE
    outcome = Trial(pool, fault.where, case, obligations=obligations).outcome()
    assert outcome.judgement is not None, outcome.reason
    first = independent(outcome.judgement.violations)[0]
    assert first.obligation == fault.obligation
    assert set(fault.causes) <= set(first.causes), first
    assert not {one.obligation for one in outcome.judgement.violations} & set(fault.spares)
    plain = Trial(pool, fault.parent, case, obligations=obligations).outcome()
    assert plain.status == "holds", plain.reason or plain.judgement
