"""Spaces of cases: all that is made is valid, supported, and has the features asked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from zerocheck.case.drawing import CaseMaker
from zerocheck.case.features import features
from zerocheck.case.schema import Case
from zerocheck.case.space import Asking, CaseSpace
from zerocheck.case.validity import check
from zerocheck.errors import UsageError


def refusing(reason_of: Callable[[Case], str | None]) -> Asking:
    """Ask a function for each case."""

    def ask(cases: Sequence[Case]) -> list[str | None]:
        return [reason_of(case) for case in cases]

    return ask


def made(space: CaseSpace, count: int = 30) -> list[Case]:
    """Cases by random choices. None is made in vain."""
    source = random.Random(0)
    found = [
        space.make(lambda n: int(source.random() * n), lambda make: make()) for _ in range(count)
    ]
    cases = [case for case in found if case is not None]
    assert len(cases) == count
    for case in cases:
        check(case)
    return cases


def test_nothing_is_changed_where_all_is_supported() -> None:
    space = CaseSpace((2,))
    maker, source = CaseMaker((2,)), random.Random(0)
    for case in made(space):
        source.random()  # of the world sizes
        assert case == maker.make(lambda n: int(source.random() * n))


def narrow(case: Case) -> str | None:
    """Code that is made for little: it refuses all but a few of the cases that are drawn."""
    if any(block.kind != "mlp" for block in case.model.blocks):
        return "mlp only"
    if len(case.optimizer.groups) > 1:
        return f"one group, not {len(case.optimizer.groups)}"
    if case.optimizer.schedule != "constant" or case.optimizer.amsgrad or case.optimizer.maximize:
        return "plain AdamW only"
    return None if case.training.clip is None else "no clipping"


def test_what_is_refused_is_taken_back_and_nothing_else() -> None:
    drawn = made(CaseSpace((1, 2, 3)))
    cases = made(CaseSpace((1, 2, 3), ask=refusing(narrow)))
    assert sum(narrow(case) is not None for case in drawn) > 20
    assert not any(map(narrow, cases))
    assert len({*cases}) > 20
    assert {case.mesh for case in cases} == {(1,), (2,), (3,)}
    for before, after in zip(drawn, cases, strict=True):
        assert (before.seed, before.mesh, before.data) == (after.seed, after.mesh, after.data)
        assert before.start.step == after.start.step


def test_the_first_choices_make_the_simplest_case() -> None:
    space = CaseSpace((3, 1, 2), ((1, 2),))
    case = space.make(lambda n: 0, lambda make: make())
    assert case is not None
    assert case.mesh == (1,) and case.model.blocks == () and case.training.steps == 1


def test_world_sizes_that_are_refused_are_left_out() -> None:
    even = refusing(lambda case: "even ranks only" if case.world_size % 2 else None)
    assert {case.mesh for case in made(CaseSpace((1, 2, 3, 4), ask=even))} == {(2,), (4,)}


def test_meshes_of_two_axes_are_as_often_as_one_world_size() -> None:
    cases = made(CaseSpace((1, 2, 3), ((1, 2), (2, 2), (2, 3))), 200)
    assert {case.mesh for case in cases} == {(1,), (2,), (3,), (1, 2), (2, 2), (2, 3)}
    assert 25 < sum(len(case.mesh) == 2 for case in cases) < 75
    fixed = made(CaseSpace((1, 2), ((1, 2),), {"mesh": [2]}))
    assert {case.mesh for case in fixed} == {(2,)}


@pytest.mark.parametrize(
    "wanted", [("clip", "microbatches"), ("transposed", "frozen"), ("world-3",), ("two-axes",)]
)
def test_features_that_are_asked_for(wanted: tuple[str, ...]) -> None:
    space = CaseSpace((1, 2, 3), ((2, 2),), wanted=wanted)
    cases = made(space)
    assert all({*wanted} <= {*features(case)} for case in cases)
    assert len({*cases}) > 20
    case = space.make(lambda n: 0, lambda make: make())
    assert case is not None and len(case.model.blocks) <= 1


def test_features_stay_where_something_else_is_refused() -> None:
    space = CaseSpace((1, 2), wanted=("microbatches",), ask=refusing(narrow))
    cases = made(space)
    assert all("microbatches" in features(case) and narrow(case) is None for case in cases)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ask": refusing(lambda case: "it is Monday")}, "it is Monday"),
        ({"wanted": ("clip",), "ask": refusing(narrow)}, "no clipping"),
        ({"wanted": ("clip",), "fixed": {"training": {"clip": None}}}, "features asked for: clip"),
        (
            {"fixed": {"model": {"padding_idx": 3, "stem": "dense"}}},
            "leave no case in 100 attempts: model.padding_idx needs",
        ),
    ],
)
def test_spaces_without_a_case(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CaseSpace((1, 2), **given)  # type: ignore[arg-type]
