"""The ledger of a GPU closes against `torch.cuda.memory_allocated`, at the end of every phase."""

from __future__ import annotations

import msgspec
import pytest

from zerocheck.case.schema import Block, Case, Data, Model, Optimizer, Training
from zerocheck.catalogue import BUILT_IN
from zerocheck.faults.registry import FAULTS
from zerocheck.judge.measurements import judge_measured
from zerocheck.protocol.jobs import Measure
from zerocheck.protocol.measurements import UNEXPLAINED
from zerocheck.protocol.replies import MemoryReply
from zerocheck.protocol.verdicts import Obligation
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.rank_replies import received
from zerocheck.run.execute.trial import Trial


def case(world_size: int, **optimizer: object) -> Case:
    return Case(
        mesh=(world_size,),
        model=Model(inputs=33, width=40, outputs=7, blocks=(Block(kind="mlp", hidden=65),) * 2),
        data=Data(batch=3, length=5),
        training=Training(steps=2, microbatches=2),
        optimizer=Optimizer(**optimizer),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_byte_has_a_holder(pool: Pool, name: str, world_size: int) -> None:
    asked = case(world_size)
    job = msgspec.msgpack.encode(Measure(name, asked))
    result = pool.wait(pool.submit(world_size, job))
    assert result.outcome == "finished", result.summary()
    replies = received(result, MemoryReply)
    result.release()
    for reply in replies:
        assert reply.device == "cuda:0"
        measured = reply.measured
        assert measured.pools and not measured.peaks
        assert {(pool.step, pool.phase) for pool in measured.pools} >= {
            (line.step, line.phase) for line in measured.lines
        }
        for one in measured.pools:
            assert one.unexplained == 0, one
            assert one.rounding >= 0 and one.allocated <= one.reserved and one.inactive >= 0
        assert not [line for line in measured.lines if line.holder.startswith(UNEXPLAINED)]
        assert any(one.rounding > 0 for one in measured.pools)
    judgement = judge_measured(asked, replies)
    assert judgement.statuses["persistent"] == "holds", judgement.violations
    assert judgement.statuses["release"] == "holds", judgement.violations
    assert judgement.statuses["communication"] == "holds", judgement.violations
    assert judgement.statuses["peak"] == "not exercised"


@pytest.mark.parametrize("kernel", ["for-loop", "fused"])
def test_step_counts_are_counted_wherever_they_are(pool: Pool, kernel: str) -> None:
    """On the CPU for the one, on the GPU for the other."""
    for name in ("ddp", "zero1", "fsdp2"):
        trial = Trial(pool, name, case(2, kernel=kernel), obligations=("persistent",))
        found = trial.outcome()
        assert found.status == "holds", (name, found.judgement)


@pytest.mark.parametrize("obligation", ["persistent", "release", "communication"])
def test_planted_faults_are_caught(pool: Pool, obligation: Obligation) -> None:
    """Of most obligations some need a feature that this case does not have."""
    rows = [f for f in FAULTS.values() if f.obligation == obligation and "+" not in f.where]
    assert rows
    caught = 0
    for row in rows:
        trial = Trial(pool, row.where, case(3), obligations=(obligation,))
        judgement = trial.outcome().judgement
        caught += judgement is not None and bool(judgement.violations)
    assert caught
