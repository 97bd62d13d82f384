"""Options of a library's engine: drawn by the seed, and only for who obeys them."""

from __future__ import annotations

import pytest

from zerocheck.case.drawing import draw
from zerocheck.case.engine_options import DRAWN, drawn, plain
from zerocheck.case.features import FEATURES, features
from zerocheck.case.schema import Sharding


def test_the_defaults_come_first_and_are_those_of_the_schema() -> None:
    default = Sharding()
    assert {name: values[0] for name, values in DRAWN.items()} == {
        name: getattr(default, name) for name in DRAWN
    }


def test_every_value_is_drawn_and_every_option_has_a_feature() -> None:
    seen = {name: {drawn(seed)[name] for seed in range(200)} for name in DRAWN}
    assert seen == {name: set(values) for name, values in DRAWN.items()}
    assert set(DRAWN) <= {row.field for row in FEATURES.values()}


def test_the_seed_of_a_case_says_which() -> None:
    for case in draw(50, seed=3, world_sizes=(2,)):
        assert {name: getattr(case.sharding, name) for name in DRAWN} == drawn(case.seed)


@pytest.mark.parametrize("obeyed", [None, (), ("bucket",)])
def test_who_does_not_obey_them_gets_the_cases_that_there_were_before(
    obeyed: tuple[str, ...] | None,
) -> None:
    """All other choices stay as they are, and no feature of these options is there."""
    names = {row.name for row in FEATURES.values() if row.field in DRAWN}
    fixed = {"sharding": plain(obeyed)}
    cases = draw(60, seed=3, world_sizes=(1, 2, 3), fixed=fixed)
    assert not any(names & set(features(case)) for case in cases)
    others = draw(60, seed=3, world_sizes=(1, 2, 3))
    assert [case.model for case in cases] == [case.model for case in others]
    assert [case.training for case in cases] == [case.training for case in others]


def test_what_is_obeyed_is_not_fixed() -> None:
    assert "overlap_comm" not in plain(("overlap_comm",))
    assert "offload" in plain(("overlap_comm",))
    assert set(plain(("overlap_comm",))) == set(DRAWN) - {"overlap_comm"}
