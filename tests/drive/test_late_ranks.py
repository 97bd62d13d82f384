"""What delays do to whole cases: nothing to what waits where it must."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from borrowing import borrowed
from msgspec.structs import replace

from zerocheck.case.schema import Block, Case, Disturbance, Model, Sharding, Training
from zerocheck.catalogue import BUILT_IN
from zerocheck.faults.registry import FAULTS
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial

CASE = Case(
    mesh=(3,),
    model=Model(blocks=(Block(kind="mlp"), Block(kind="mlp"))),
    training=Training(steps=2, microbatches=3, clip=1e-2),
    sharding=Sharding(bucket=64, sync="each"),
)


@pytest.fixture(scope="module")
def pool(session_pool: Pool) -> Iterator[Pool]:
    with borrowed(session_pool, patience_s=3.0) as ranks:
        yield ranks


def digest(pool: Pool, name: str, delay: float) -> str:
    case = replace(CASE, disturbance=Disturbance(delay=delay))
    outcome = Trial(pool, name, case).outcome(digest=True)
    assert outcome.status == "holds", (name, outcome)
    assert outcome.judgement is not None
    return outcome.judgement.digest


@pytest.mark.every(2)
@pytest.mark.parametrize("name", BUILT_IN)
def test_delays_change_no_bit_of_what_is_right(pool: Pool, name: str) -> None:
    assert digest(pool, name, 0.0) == digest(pool, name, 3.0)


@pytest.mark.parametrize("name", ["bucket-reused", "pingpong-reset"])
def test_without_delays_gloo_hides_a_buffer_that_is_reused(pool: Pool, name: str) -> None:
    """Its reduce-scatter copies what it gets before it returns. So do not count on a quiet run."""
    for _ in range(3):
        digest(pool, FAULTS[name].where, 0.0)
