"""Variants of a smallest case whose numbers tell causes apart."""

from __future__ import annotations

import msgspec
import pytest

from zerocheck.case.schema import Case, Data, Model, Sharding, Training, TrainingSegment
from zerocheck.case.validity import check
from zerocheck.protocol.verdicts import Judgement, Violation
from zerocheck.run.findings.bug import Parted
from zerocheck.run.findings.findings import Findings
from zerocheck.run.findings.parting import distinct, variants
from zerocheck.run.records.records import CaseFinished
from zerocheck.run.records.tally import Tally


def case(*mesh: int, microbatches: int = 1, **given: object) -> Case:
    training = Training(steps=1, microbatches=microbatches)
    return Case(mesh=mesh, training=training, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "tells"),
    [
        (case(2), False),
        (case(3), False),
        (case(2, microbatches=3), False),
        (case(3, microbatches=3), False),
        (case(3, microbatches=2), True),
        (case(2, 3, microbatches=4), True),
        (case(2, 2, microbatches=4), False),
        (case(2, 3, microbatches=3), False),
        (case(5, microbatches=3, hosts=(2,)), True),
        (case(5, microbatches=3, hosts=(3,)), False),
        (case(5, microbatches=3, hosts=(1,)), False),
    ],
)
def test_distinct_numbers(one: Case, tells: bool) -> None:
    assert distinct(one) == tells


def test_variants_are_valid_and_distinct_and_keep_the_rest() -> None:
    for one in (case(2, model=Model(tied=True, stem="embedding", outputs=4, inputs=4)), case(1, 2)):
        found = list(variants(one))
        assert found
        assert distinct(found[0]) and found[0].hosts
        for variant in found:
            check(variant)
            assert distinct(variant, one_microbatch=True) and variant.model == one.model
            assert variant.axes.has("replicate") == one.axes.has("replicate")


@pytest.mark.parametrize("field", ["tensor_parallel", "context_parallel", "pipeline_parallel"])
def test_variants_keep_the_size_of_an_inner_axis(field: str) -> None:
    sharding = msgspec.structs.replace(Sharding(), **{field: 2})
    one = case(4, microbatches=2, data=Data(length=4), sharding=sharding)
    assert not distinct(one)
    first = next(variants(one))
    assert first.sharding.inner == one.sharding.inner and first.axes.size("shard") == 3
    assert first.training.microbatches == 5 * one.axes.size("pp")


def test_there_are_none_of_a_case_that_is_distinct_or_resumed_or_fixed() -> None:
    assert list(variants(case(3, microbatches=2))) == []
    assert list(variants(msgspec.structs.replace(case(2), resume=(TrainingSegment(),)))) == []
    assert list(variants(case(2), kept=("training.microbatches",))) == []
    assert list(variants(case(2), kept=("mesh",))) == []
    meshes = [(one.mesh, one.training.microbatches) for one in variants(case(3), kept=("mesh",))]
    assert meshes == [((3,), 5), ((3,), 1)]


def test_they_do_not_clip_unless_clipping_is_fixed() -> None:
    clipped = msgspec.structs.replace(case(2), training=Training(steps=1, microbatches=1, clip=1.0))
    clips = [one.training.clip for one in variants(clipped)]
    assert clips[0] is None and 1.0 in clips
    assert {one.training.clip for one in variants(clipped, kept=("training.clip",))} == {1.0}


def violation(*causes: str, role: str = "gradient") -> Violation:
    return Violation(
        obligation="gradient",
        step=0,
        role=role,
        tensors=(),
        ranks=(),
        explanation=f"it is {' or '.join(causes) or 'wrong'}",
        causes=causes,
    )


def found(*given: Violation) -> Findings:
    """Return the findings of a run whose cases show one violation each."""
    findings = Findings()
    for number, one in enumerate(given):
        judgement = Judgement(statuses={"gradient": "violated"}, violations=(one,))
        findings.add(
            CaseFinished(
                number=number,
                implementation="mine",
                case=case(2),
                status="violated",
                judgement=judgement,
            )
        )
    return findings


def left(findings: Findings) -> list[tuple[str, ...]]:
    return [bug.causes for bug in findings.bugs if bug.merged is None]


def test_a_distinct_case_refutes_causes_that_coincide() -> None:
    findings = found(violation("gradient x W", "gradient doubled"))
    findings.part(findings.bugs[0], Parted("on 3 ranks", violation("gradient doubled")))
    assert left(findings) == [("gradient doubled",)]


def test_a_distinct_case_whose_cause_is_another_one_refutes_all() -> None:
    findings = found(violation("gradient x W", "gradient doubled"))
    findings.part(findings.bugs[0], Parted("on 3 ranks", violation("gradient scaled")))
    (bug,) = findings.bugs
    assert bug.causes == ("gradient scaled",)
    assert bug.title == "on 3 ranks: it is gradient scaled"
    # An entry of known issues is held against the causes of the case that fails.
    assert bug.fingerprint == "mine / gradient / gradient x W+gradient doubled"


def test_a_distinct_case_without_a_cause_leaves_them() -> None:
    findings = found(violation("gradient x W", "gradient doubled"))
    assert findings.part(findings.bugs[0], Parted("on 3 ranks", violation())) == []
    assert left(findings) == [("gradient x W", "gradient doubled")]


def test_two_findings_that_a_distinct_case_shows_to_be_one_are_merged() -> None:
    findings = found(violation("local gradient only"), violation("reduced in smaller groups"))
    assert len(left(findings)) == 2
    first, second = findings.bugs
    changed = findings.part(first, Parted("on 3 ranks", violation("reduced in smaller groups")))
    assert changed == [second] and second.merged == 0
    assert second.finding(1).merged == 0
    assert left(findings) == [("reduced in smaller groups",)]
    assert first.cases == 2
    # A further case of few ranks shows the same bug, and no new one.
    more = found(violation("local gradient only")).bugs[0].first
    findings.add(more)
    assert left(findings) == [("reduced in smaller groups",)] and first.cases == 3


def test_findings_of_another_role_stay_apart() -> None:
    findings = found(violation("stale"), violation("other", role="master"))
    assert findings.part(findings.bugs[0], Parted("on 3 ranks", violation("other"))) == []
    assert len(left(findings)) == 2


def test_a_merged_finding_is_counted_no_more() -> None:
    findings = found(violation("local gradient only"), violation("reduced in smaller groups"))
    counted = Tally()
    for number, bug in enumerate(findings.bugs):
        counted.add(bug.finding(number))
    assert len(counted.findings) == 2
    findings.part(findings.bugs[0], Parted("on 3 ranks", violation("reduced in smaller groups")))
    for number, bug in enumerate(findings.bugs):
        counted.add(bug.finding(number))
    (one,) = counted.findings
    assert one.cases == 2
