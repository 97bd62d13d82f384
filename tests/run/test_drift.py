"""How far free runs drift, and which cases of a run are left to themselves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from collected import Collect
from msgspec.structs import replace

from zerocheck.case.schema import (
    Block,
    Case,
    Group,
    Model,
    Optimizer,
    Precision,
    Start,
    Training,
    TrainingSegment,
)
from zerocheck.contract.semantics import Semantics
from zerocheck.judge.free_run import trajectory
from zerocheck.protocol.verdicts import EQUIVALENCE, Judgement
from zerocheck.ranks.pool import Pool
from zerocheck.run import drift as drift_runs
from zerocheck.run.drift import CASES, DriftRuns, comparable, drift
from zerocheck.run.engine import run
from zerocheck.run.execute.free_runs import STEPS, free_run_case
from zerocheck.run.plan.options import RunOptions
from zerocheck.run.records.records import CaseFinished, Drift, Finding, FreeRun

MIDST = Start(step=255, moments="typical")
"""From moments of 0 AdamW is nearly blind to the scale of a gradient; in mid-training it is not.
The rate of CASE is large, so that round-off of gradients is not lost beside the parameters."""
CASE = Case(
    mesh=(3,),
    model=Model(blocks=(Block(kind="mlp"), Block(kind="layer_norm"))),
    optimizer=Optimizer(groups=(Group(lr=0.1),)),
    start=MIDST,
    training=Training(microbatches=2),
)
FAULTS = "zerocheck.faults"


def ends(pool: Pool, name: str, case: Case = CASE) -> tuple[float, float]:
    """The relative drift of an implementation after the last step, and of the replica."""
    found = drift(pool, name, free_run_case(case, {}))
    assert found.own is not None and found.replica is not None, found.broken
    for one in (found.own, found.replica):
        assert len(one.losses) == len(one.largest) == len(one.relative) == STEPS
    assert found.expected[0] == pytest.approx(found.own.losses[0], rel=1e-5)
    return found.own.relative[-1], found.replica.relative[-1]


@pytest.mark.parametrize("name", ["zero2", "ddp", "fsdp2"])
def test_what_is_right_ends_near_its_twin(pool: Pool, name: str) -> None:
    """Within a decade of the plot: both have the same sums in fp32, in orders of their own."""
    own, replica = ends(pool, name)
    assert replica > 0 and own < 10 * replica


@pytest.mark.parametrize("name", ["gradient:AverageBecomesSum", "gradient:OneParameterUnreduced"])
def test_a_fault_ends_far_above_its_twin(pool: Pool, name: str) -> None:
    own, replica = ends(pool, f"{FAULTS}.{name}")
    assert own > 1000 * replica


def test_the_twin_is_right_and_another_one() -> None:
    """It differs from the reference by round-off alone, and two terms have no order."""
    free = free_run_case(CASE, {})
    reference, replica = (
        trajectory(free, Semantics(), restored=True, path=True, replica=other)
        for other in (False, True)
    )
    for name, wanted in reference.parameters.items():
        assert torch.equal(reference.path[-1][name], wanted)
        torch.testing.assert_close(replica.parameters[name], wanted, rtol=1e-5, atol=1e-6)
    assert any(
        not torch.equal(replica.parameters[n], reference.parameters[n]) for n in replica.path[0]
    )
    two = replace(free, mesh=(2,), training=replace(free.training, microbatches=1))
    same = [trajectory(two, Semantics(), restored=True, replica=other) for other in (False, True)]
    assert all(torch.equal(v, same[1].parameters[n]) for n, v in same[0].parameters.items())


def test_what_breaks_says_why(pool: Pool) -> None:
    subjects = Path(__file__).with_name("subjects.py")
    found = drift(pool, f"{subjects}:KilledInStep1", free_run_case(CASE, {}))
    assert found.own is None and "rank 1" in found.broken
    assert found.implementation.endswith("KilledInStep1") and found.case.training.steps == STEPS


@pytest.mark.parametrize(
    "case",
    [
        replace(CASE, resume=(TrainingSegment(mesh=(2,)),)),
        replace(CASE, precision=Precision(compute="bf16")),
        replace(CASE, training=replace(CASE.training, compile="eager")),
        replace(CASE, model=replace(CASE.model, blocks=(Block(kind="mlp", dtype="bf16"),))),
        replace(CASE, model=replace(CASE.model, unused=True)),
        replace(CASE, model=replace(CASE.model, width=1 << 11, inputs=1 << 10)),
    ],
)
def test_what_the_reference_cannot_be_laid_beside_is_left_out(case: Case) -> None:
    assert comparable(CASE) and not comparable(case)


def finished(case: Case, status: str = "holds", name: str = "zero2") -> CaseFinished:
    judged = Judgement(statuses=dict.fromkeys(EQUIVALENCE, "holds"))
    return CaseFinished(number=0, implementation=name, case=case, status=status, judgement=judged)


def test_one_case_of_an_implementation_with_enough_of_them(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One on three or four ranks, if there is one, with the longest steps and the most terms; none
    that failed, none on one rank."""
    driven: list[Case] = []

    def noted(_: object, name: str, case: Case) -> Drift:
        driven.append(case)
        return Drift(implementation=name, case=case)

    monkeypatch.setattr(drift_runs, "drift", noted)
    cases = DriftRuns(pool, {"zero2": {}, "ddp": {}, "zero3": {"training": {"steps": 1}}})
    for seed in range(CASES - 1):
        cases.note(finished(replace(CASE, mesh=(1 + seed % 5,), seed=seed)))
        cases.note(finished(CASE, "violated", "ddp"))
    assert list(cases.results()) == []
    cases.note(finished(replace(CASE, mesh=(1,))))
    cases.note(finished(CASE, "violated", "ddp"))
    cases.note(finished(replace(CASE, mesh=(4,), optimizer=Optimizer(), seed=99)))
    for seed in range(CASES):
        cases.note(finished(replace(CASE, mesh=(2,), seed=seed), name="zero3"))
    assert [one.implementation for one in cases.results()] == ["zero2", "zero3"]
    assert driven == [
        free_run_case(replace(CASE, mesh=(4,), seed=3), {}),
        replace(CASE, mesh=(2,), seed=0),
    ]


def test_a_run_leaves_its_findings_to_themselves(pool: Pool, tmp_path: Path) -> None:
    name = f"{FAULTS}.gradient:AverageBecomesSum"
    options = RunOptions(
        implementations=(name,), world_sizes=(3,), max_cases=2, report_dir=tmp_path
    )
    records = Collect()
    assert run(options, [records], ranks=pool) == 1
    drifts, found = records.of(Drift), {one.number: one for one in records.of(Finding)}
    assert drifts and not Counter(one.finding for one in drifts).keys() - found.keys()
    one = drifts[0]
    assert one.finding is not None and isinstance(one.own, FreeRun)
    violation = found[one.finding].violation
    assert violation is not None and one.parts == max(violation.step, 0)
    assert one.own.relative[-1] > 0 and one.case.training.steps == STEPS
