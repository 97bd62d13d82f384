"""The obligations of MEMORY on real ranks: cases that are measured, from the run to the replay."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from slices import sliced

from zerocheck.case.schema import (
    Block,
    BlockKind,
    Case,
    Data,
    Disturbance,
    Model,
    Precision,
    Sharding,
    Training,
)
from zerocheck.catalogue import BUILT_IN
from zerocheck.protocol.jobs import Measure
from zerocheck.protocol.measurements import UNEXPLAINED
from zerocheck.protocol.replies import MemoryReply
from zerocheck.protocol.verdicts import MEMORY, MeasuredBytes
from zerocheck.ranks.pool import Pool
from zerocheck.report.footprint import lines as weighed_lines
from zerocheck.run.execute.environment import environment
from zerocheck.run.execute.rank_replies import received
from zerocheck.run.execute.segments import Segments
from zerocheck.run.execute.trial import Trial
from zerocheck.run.findings.case_file import read, write
from zerocheck.run.records.records import CaseFile
from zerocheck.run.records.tally import tally
from zerocheck.run.replay import replay

MODEL = Model(blocks=(Block(kind="mlp", hidden=5), Block(kind="batch_norm")), width=7)
CASES = {
    "plain": Case(mesh=(3,), model=MODEL, sharding=Sharding(wrap="layer", prefetch=0)),
    "accumulated": Case(
        mesh=(2,),
        model=MODEL,
        training=Training(microbatches=2, clip=1.0, set_to_none=False),
        sharding=Sharding(bucket=16, reshard=False),
    ),
    "scaled": Case(
        mesh=(2,),
        model=msgspec.structs.replace(MODEL, frozen=("stem.*",)),
        training=Training(steps=3, loss_scale=2.0, overflow=1, unfreeze=2),
    ),
}
FAULT = "zerocheck.faults.memory:CopyKept"
ASKED = ("persistent", "peak", "release")


@pytest.mark.every(6)
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_implementation_holds_what_its_layout_says(pool: Pool, name: str) -> None:
    held = 0
    for case in CASES.values():
        outcome = Trial(pool, name, case, obligations=ASKED).outcome()
        if outcome.status == "unsupported":
            continue
        assert outcome.judgement is not None, outcome.reason
        assert outcome.judgement.statuses == dict.fromkeys(ASKED, "holds"), outcome.judgement
        held += 1
    assert held


@pytest.mark.every(4)
@pytest.mark.parametrize("name", sliced(tuple(BUILT_IN), ("ddp", "fsdp1", "fsdp2", "zero2")))
def test_without_a_layout_every_implementation_holds_its_share(pool: Pool, name: str) -> None:
    """What its stage and its shards tell is no false alarm, and no exact prediction."""
    kind = BUILT_IN[name].partition(":")[2]
    place = f"{Path(__file__).with_name('without_layouts.py')}:{kind}"
    held = 0
    for case in CASES.values():
        outcome = Trial(pool, place, case, obligations=("persistent",)).outcome()
        if outcome.status == "unsupported":
            continue
        assert outcome.judgement is not None, outcome.reason
        assert outcome.judgement.statuses == {"persistent": "holds"}, outcome.judgement
        assert not outcome.judgement.vacuous
        held += 1
    assert held


@pytest.mark.every(2)
@pytest.mark.parametrize("loss_scale", [None, 2.0])
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_what_learns_later_in_mixed_precision(
    pool: Pool, name: str, loss_scale: float | None
) -> None:
    """Some ranks have nothing to update until then, and widen no gradient."""
    case = Case(
        mesh=(4,),
        model=Model(blocks=(Block(kind="mlp", hidden=5),), width=7, frozen=("stem.*", "blocks.*")),
        training=Training(steps=3, unfreeze=2, loss_scale=loss_scale),
        precision=Precision(compute="bf16", reduce="bf16"),
        sharding=Sharding(bucket=1 << 20),
    )
    outcome = Trial(pool, name, case, obligations=ASKED).outcome()
    assert outcome.judgement is not None and not outcome.judgement.violations


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["zero2", "zero3", "fsdp2"])
@pytest.mark.parametrize("kind", ["recurrent", "batch_norm", "group_norm"])
def test_working_memory_is_that_of_a_bare_pass(pool: Pool, name: str, kind: BlockKind) -> None:
    """Temporaries of these live longer where operators run through Python, as they do here."""
    blocks = (Block(kind="layer_norm"), Block(kind=kind))
    model = Model(stem="embedding", inputs=6, width=4, blocks=blocks, outputs=8)
    case = Case(mesh=(2,), model=model, data=Data(batch=3, length=4), training=Training(steps=3))
    outcome = Trial(pool, name, case, obligations=("peak",)).outcome()
    assert outcome.judgement is not None
    assert outcome.judgement.statuses == {"peak": "holds"}, outcome.judgement.violations
    assert not outcome.judgement.vacuous


@pytest.mark.long
def test_what_fsdp2_reduced_over_replicas_stays_until_the_backward_is_over(pool: Pool) -> None:
    """Where it was added to a gradient, it is held beside it, by each unit."""
    model = Model(width=1, blocks=(Block(kind="recurrent"), Block(kind="mlp", hidden=8)))
    training = Training(steps=3, set_to_none=False)
    case = Case(mesh=(2, 2), model=model, training=training, sharding=Sharding(wrap="layer"))
    outcome = Trial(pool, "fsdp2", case, obligations=("peak",)).outcome()
    assert outcome.judgement is not None
    assert outcome.judgement.statuses == {"peak": "holds"}, outcome.judgement.violations


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_looking_for_an_overflow_takes_no_memory(pool: Pool, name: str) -> None:
    """Masks of the largest parameter were more than the backward of so few samples needs."""
    model = Model(inputs=17, width=3, outputs=4, blocks=(), unused=True)
    training = Training(steps=3, loss_scale=2.0)
    case = Case(mesh=(3,), model=model, data=Data(batch=4, length=1), training=training)
    outcome = Trial(pool, name, case, obligations=("peak",)).outcome()
    assert outcome.judgement is not None
    assert outcome.judgement.statuses == {"peak": "holds"}, outcome.judgement.violations


def test_what_is_measured_closes_and_tells_every_phase(pool: Pool) -> None:
    result = Trial(pool, "ddp", CASES["plain"], obligations=ASKED).result()
    assert not result.segments and result.measured is not None
    replies = received(result.measured, MemoryReply)
    result.measured.release()
    for reply in replies:
        assert reply.measured.layout is not None
        lines = reply.measured.lines
        assert not any(line.holder.startswith(UNEXPLAINED) for line in lines)
        assert {(line.step, line.phase) for line in lines} == {
            (-1, "built"),
            *((step, phase) for step in range(3) for phase in ("forward", "backward", "step")),
        }
        assert any(line.category == "activation" for line in lines)


def test_with_other_obligations_the_steps_are_run_too(pool: Pool) -> None:
    result = Trial(pool, "zero1", CASES["plain"], obligations=("update", "release")).result()
    assert len(result.segments) == 1 and len(result.all) == 2
    for one in result.all:
        one.release()
    plain = Trial(pool, "zero1", CASES["plain"]).result()
    assert plain.measured is None
    for one in plain.all:
        one.release()
    both = Trial(pool, FAULT, CASES["plain"], obligations=("update", *MEMORY)).outcome()
    assert both.judgement is not None
    assert both.judgement.statuses["update"] == "holds"
    assert [one.obligation for one in both.judgement.violations] == ["persistent", "peak"]


def test_a_finding_of_memory_is_replayed_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    outcome = Trial(pool, FAULT, CASES["plain"], obligations=ASKED).outcome()
    assert outcome.status == "violated"
    file = CaseFile(
        implementation=FAULT,
        case=CASES["plain"],
        status="violated",
        judgement=outcome.judgement,
        environment=environment(),
        obligations=ASKED,
    )
    replayed = replay(read(write(tmp_path, "memory", file)), implementation=FAULT, ranks=pool)
    assert replayed is not None and replayed.exit_code == 1
    assert replayed.verdict.startswith("reproduced bit for bit")


def test_nothing_is_delayed_where_ranks_are_measured() -> None:
    """A collective that begins on another thread lets go of its memory there, unseen."""
    case = msgspec.structs.replace(CASES["plain"], disturbance=Disturbance(delay=2.0))
    job = Segments("zero-redundancy", case, trace=False).measuring()
    assert job == Measure("zero-redundancy", CASES["plain"])


def test_an_own_sharder_without_a_layout_gets_the_ratio_alone(pool: Pool) -> None:
    """What `fully_shard` makes of a model of 32 x 32 layers: padding is nothing, step counts are 4
    bytes for each of the parameters."""
    model = Model(inputs=32, width=32, blocks=(Block(kind="mlp", hidden=32),), outputs=32)
    case = Case(mesh=(2,), model=model)
    name = f"{Path(__file__).with_name('subjects.py')}:build"
    outcome = Trial(pool, name, case, obligations=MEMORY).outcome()
    judgement = outcome.judgement
    assert judgement is not None, outcome.reason
    # It declares no stage either, so how much it may hold is not known.
    assert judgement.statuses == {**dict.fromkeys(MEMORY, "holds"), "persistent": "not exercised"}
    declared = Trial(pool, name.replace(":build", ":declared"), case, obligations=MEMORY).outcome()
    assert declared.judgement is not None, declared.reason
    assert declared.judgement.statuses == dict.fromkeys(MEMORY, "holds")
    assert "persistent" not in declared.judgement.vacuous
    psi, tensors = 4 * (32 * 32 + 32), 8
    assert judgement.measured_bytes == MeasuredBytes(
        copy=(4 * psi, 4 * psi, 8 * psi),
        held=8 * psi + 4 * tensors,
        total=16 * psi + 2 * 4 * tensors,
        sent=float(3 * psi * 4 - psi * 4 // 2) / 2,
        trained=4 * psi,
        elements=psi,
        by_kind={"all_gather": 3 * psi, "reduce_scatter": 2 * psi},
    )
    counted = tally([outcome.record(0, name, case)])
    (line,) = weighed_lines(counted.implementations)
    assert "1.00 times 16 Psi/N, the nearest" in line
    assert line.endswith(
        "2.50 Psi sent (paper: 3); 0.50 is not gathered again: the root unit, and units that do "
        "not reshard, stay gathered for the backward; no layout, so the ratio alone"
    )
