"""Variants of a smallest case whose numbers tell causes apart."""

from __future__ import annotations

import msgspec
import pytest

from zerocheck.case.schema import Case, Model, Training, TrainingSegment
from zerocheck.case.validity import check
from zerocheck.run.findings.parting import distinct, variants


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
    ],
)
def test_distinct_numbers(one: Case, tells: bool) -> None:
    assert distinct(one) == tells


def test_variants_are_valid_and_distinct_and_keep_the_rest() -> None:
    for one in (case(2, model=Model(tied=True, stem="embedding", outputs=4, inputs=4)), case(1, 2)):
        found = list(variants(one))
        assert found
        for variant in found:
            check(variant)
            assert distinct(variant) and variant.model == one.model
            assert variant.axes.has("replicate") == one.axes.has("replicate")


def test_there_are_none_of_a_case_that_is_distinct_or_resumed_or_fixed() -> None:
    assert list(variants(case(3, microbatches=2))) == []
    assert list(variants(msgspec.structs.replace(case(2), resume=(TrainingSegment(),)))) == []
    assert list(variants(case(2), kept=("training.microbatches",))) == []
    assert list(variants(case(2), kept=("mesh",))) == []
    assert [one.mesh for one in variants(case(3), kept=("mesh",))] == [(3,), (3,)]
