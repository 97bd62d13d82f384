"""Step time on paper: sums by hand, and the order of collectives that the simulation shows."""

from __future__ import annotations

from fractions import Fraction
from math import prod

import pytest

from zerocheck.memory.analyse import run
from zerocheck.memory.fit.result import Speeds
from zerocheck.memory.fit.step_time import PaperSchedule, PaperUnit, paper_schedule
from zerocheck.memory.operations import forward_operations
from zerocheck.memory.setup import Setup
from zerocheck.memory.simulate import STEPS, simulate
from zerocheck.memory.source import source

RANKS = 4
NO_UNIT = PaperUnit(0, 0, 0, 0)


def laid_out(speeds: Speeds, name: str = "fsdp2", **more: object) -> tuple[PaperSchedule, Setup]:
    options = {"world_size": RANKS, "batch": 2, "sequence": 29, "precision": "fp32", **more}
    setup = Setup(model="small_models:stepped", implementation=name, **options)  # type: ignore[arg-type]
    given = source(setup.model)
    traffic = run(setup, given).traffic
    found = paper_schedule(setup, given.build(), forward_operations(given, setup), traffic, speeds)
    assert found is not None
    return found, setup


def test_by_hand() -> None:
    """Two units. Forward: gather 3, then compute 5 while the next gather (4) runs, compute 5.

    Backward, from 13: gather 4 in the open, compute 10 while 3 are gathered, reduce 6 and compute
    10 side by side, reduce 6 in the open.
    """
    schedule = PaperSchedule(again=False)
    schedule.microbatch(NO_UNIT, [PaperUnit(5, 3, 3, 6), PaperUnit(5, 4, 4, 6)])
    time = schedule.time()
    assert (time.compute, time.link) == (30, 3 + 4 + 4 + 3 + 6 + 6)
    assert time.step == 13 + 4 + 10 + 10 + 6
    assert time.exposed == time.step - 30


def test_a_gather_that_is_longer_than_the_compute_waits() -> None:
    schedule = PaperSchedule(again=False)
    schedule.microbatch(NO_UNIT, [PaperUnit(1, 3, 0, 0), PaperUnit(1, 4, 0, 0)])
    assert schedule.time().step == 3 + 4 + 1 + 2 + 2


def test_checkpointing_computes_the_forward_again() -> None:
    times = []
    for again in (False, True):
        schedule = PaperSchedule(again=again)
        schedule.microbatch(PaperUnit(2, 0, 0, 0), [PaperUnit(5, 0, 0, 0)] * 3)
        times.append(schedule.time().step)
    assert times == [3 * (2 + 15), 3 * (2 + 15) + 15]


@pytest.mark.every(10)
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_all_that_is_simulated_is_sent_and_all_operations_are_counted(
    name: str, microbatches: int
) -> None:
    speeds = Speeds(link=1e6, operations=1e9)
    schedule, setup = laid_out(speeds, name, microbatches=microbatches)
    time = schedule.time()
    given = source(setup.model)
    sent = run(setup, given).traffic.sent
    assert time.link == pytest.approx(float(sent) / speeds.link, rel=1e-12)
    operations = forward_operations(given, setup).total
    expected = 3 * microbatches * operations / speeds.operations
    assert time.compute == pytest.approx(expected, rel=1e-12)
    assert max(time.compute, time.link) <= time.step <= time.compute + time.link + 1e-12


def test_a_fast_link_exposes_nothing_and_fast_compute_exposes_everything() -> None:
    fast_link, _ = laid_out(Speeds(link=1e30, operations=1e9))
    assert fast_link.time().exposed == pytest.approx(0, abs=1e-15)
    fast_compute, _ = laid_out(Speeds(link=1e6, operations=1e30))
    time = fast_compute.time()
    assert time.exposed == pytest.approx(time.link, rel=1e-9)


def test_zero1_hides_nothing() -> None:
    time = laid_out(Speeds(link=1e6, operations=1e9), "zero1")[0].time()
    assert time.exposed == pytest.approx(time.link, rel=1e-12)


@pytest.mark.every(4)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_collectives_are_issued_in_the_order_of_the_simulation(
    reshard: bool, checkpoint: bool
) -> None:
    """Units are known by their bytes, which differ."""
    schedule, setup = laid_out(
        Speeds(link=1e6, operations=1e9), reshard=reshard, checkpoint=checkpoint
    )
    given = source(setup.model)
    model = given.build()
    units = {padded(unit.parameters()): number for number, unit in enumerate(model.layers)}  # type: ignore[union-attr,arg-type]
    root = [*model.embedding.parameters(), *model.head.parameters()]  # type: ignore[union-attr]
    units[padded(root)] = -1
    assert len(units) == 4
    calls = [c for c in simulate(setup, given).log.collectives if c.step == STEPS - 1]
    kinds = {"all-gather": "gather", "reduce-scatter": "reduce"}
    assert schedule.issued == [(kinds[call.kind], units[call.size]) for call in calls]


def padded(parameters: object) -> int:
    """Bytes of a unit in fp32, with rows padded to a multiple of the ranks."""
    sizes = (-(-p.shape[0] // RANKS) * RANKS * prod(p.shape[1:]) for p in parameters)  # type: ignore[attr-defined]
    return 4 * sum(sizes)


def test_what_a_rank_sends_is_the_share_of_a_ring() -> None:
    setup = Setup(model="small_models:small", implementation="ddp", world_size=RANKS)
    sent = run(setup, source(setup.model)).traffic
    elements = sum(p.numel() for p in source(setup.model).build().parameters())
    assert sent.parts == {("backward", "all-reduce"): Fraction(2 * 3, 4) * 4 * elements}
