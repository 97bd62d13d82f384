"""Further cases for features that cases had, and could break nothing by."""

from __future__ import annotations

from collections.abc import Sequence

from zerocheck.case.drawing import draw
from zerocheck.case.features import features
from zerocheck.case.schema import Case
from zerocheck.run.plan.covering_array import TRIES
from zerocheck.run.plan.replacements import Replacements

IDLE = draw(40, seed=3, world_sizes=(2, 3))


def source(refused: str = "") -> Replacements:
    def ask(cases: Sequence[Case]) -> list[str | None]:
        return [f"no {refused}" if refused in features(case) else None for case in cases]

    return Replacements(lambda count: draw(count, seed=4, world_sizes=(2, 3)), ask)


def having(name: str) -> Case:
    return next(case for case in IDLE if name in features(case))


def test_nothing_to_replace() -> None:
    one = source()
    one.note(IDLE[0], idle=())
    assert one.more() == []


def test_a_feature_that_another_case_exercised_is_not_replaced() -> None:
    one = source()
    one.note(having("tied"), idle=("tied",))
    one.note(having("tied"), idle=())
    assert one.more() == []


def test_replaced_until_it_is_exercised() -> None:
    one = source()
    one.note(having("tied"), idle=("tied",))
    (case,) = one.more()
    assert "tied" in features(case) and case not in IDLE
    one.note(case, idle=())
    assert one.more() == []


def test_it_ends() -> None:
    one = source()
    one.note(having("tied"), idle=("tied",))
    given = []
    while cases := one.more():
        given += cases
        for case in cases:
            one.note(case, idle=("tied",))
    assert len(given) == len(set(given)) == TRIES


def test_one_case_for_several_features() -> None:
    one = source()
    one.note(having("tied"), idle=("tied", "stem-embedding"))
    (case,) = one.more()
    assert {"tied", "stem-embedding"} <= set(features(case))


def test_what_is_refused_is_given_up() -> None:
    one = source("tied")
    one.note(having("tied"), idle=("tied",))
    assert one.more() == [] and one.more() == []
