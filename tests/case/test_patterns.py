"""Patterns have the features asked for, and little else."""

from __future__ import annotations

import pytest

from zerocheck.case.drawing import CaseMaker, attempts
from zerocheck.case.features import features
from zerocheck.case.patterns import patterns_of
from zerocheck.case.validity import check

MAKER = CaseMaker((1, 2, 3), {}, ((1, 2), (2, 2)))
PLAIN = next(case for case in attempts(MAKER, seed=0) if case is not None)


@pytest.mark.parametrize(
    ("wanted", "fields"),
    [
        (("microbatches",), {"training": {"microbatches"}}),
        (("clip", "amsgrad"), {"training": {"clip"}, "optimizer": {"amsgrad"}}),
        (("world-3",), {"mesh": None}),
        (("block-attention",), {"model": {"blocks"}}),
    ],
)
def test_fields_that_give_the_features(
    wanted: tuple[str, ...], fields: dict[str, set[str] | None]
) -> None:
    found = patterns_of(wanted, MAKER)
    assert len({pattern.case for pattern in found}) == len(found) > 1
    for pattern in found:
        check(pattern.case)
        assert pattern.case.mesh in MAKER.meshes
        assert {*wanted} <= {*features(pattern.case)}
    first = found[0].fields
    named = {name: {*of} if isinstance(of, dict) else None for name, of in first.items()}
    assert named == fields
    # The smallest comes first.
    assert len({*features(found[0].case)} - {*features(PLAIN)} - {*wanted}) <= 2


def test_fixed_fields_stay() -> None:
    maker = CaseMaker((2,), {"training": {"steps": 3, "clip": None}})
    found = patterns_of(("microbatches",), maker)
    assert {(one.case.training.steps, one.case.training.clip) for one in found} == {(3, None)}
    assert patterns_of(("clip",), maker) == []
