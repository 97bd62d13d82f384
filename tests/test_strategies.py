"""Cases of hypothesis: the same space as that of runs, only supported ones, and small ones."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from slices import sliced

from zerocheck.case.drawing import draw
from zerocheck.case.features import FEATURES, OF_OPTIMIZERS, OF_STEPS, features
from zerocheck.case.validity import check
from zerocheck.errors import UsageError
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute import shared_ranks
from zerocheck.run.execute.rank_requests import refusals
from zerocheck.strategies import Case, cases

WORLDS = (1, 2, 3, 4, 5, 8, 16)
UNHURRIED = settings(
    database=None, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
"""Rank processes wait for processors, where other tests have them."""


@pytest.fixture
def ranks(session_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Pool:
    """The ranks of all tests in place of those that `shared_ranks` would start."""
    monkeypatch.setattr(shared_ranks, "_pool", session_pool)
    return session_pool


def test_the_same_space_as_that_of_runs() -> None:
    counts: Counter[str] = Counter()

    @hypothesis.seed(0)
    @settings(UNHURRIED, max_examples=300, phases=[Phase.generate], derandomize=False)
    @given(cases(world_sizes=WORLDS))
    def collect(case: Case) -> None:
        check(case)
        counts.update(features(case))

    collect()
    others = {one for kind, names in OF_OPTIMIZERS.items() if kind != "adamw" for one in names}
    others -= {*OF_OPTIMIZERS["adamw"]}
    assert len(counts) >= 0.9 * len({*OF_STEPS} - others)


@pytest.mark.parametrize("wanted", ["transposed", *sliced(["block-attention", "frozen"], [])])
def test_shrinks_to_the_simplest(wanted: str) -> None:
    case = find(
        cases(world_sizes=(3, 2, 1)),
        FEATURES[wanted].present,
        settings=settings(UNHURRIED, max_examples=500),
    )
    (simplest,) = draw(1, seed=0, world_sizes=(1,))
    extra = {*features(case)} - {*features(simplest)}
    assert wanted in extra
    assert len(extra) <= 6, extra
    assert case.mesh == (1,)
    assert len(case.model.blocks) <= 1
    assert case.training.steps == case.training.microbatches == 1


def test_features_that_are_asked_for_are_never_drawn_in_vain() -> None:
    drawn = []

    @settings(UNHURRIED, max_examples=40, suppress_health_check=[])
    @given(cases(world_sizes=(2, 3), features=("transposed", "frozen"), fixed={"seed": 7}))
    def collect(case: Case) -> None:
        drawn.append(case)

    collect()
    assert len({*drawn}) > 20 and {case.seed for case in drawn} == {7}
    assert all({"transposed", "frozen"} <= {*features(case)} for case in drawn)


def test_only_what_the_implementation_supports(ranks: Pool) -> None:
    drawn: list[Case] = []

    @settings(UNHURRIED, max_examples=15, phases=[Phase.generate])
    @given(cases("fsdp2", world_sizes=(1, 2)))
    def collect(case: Case) -> None:
        drawn.append(case)

    collect()
    assert len(drawn) >= 15
    assert refusals(ranks, "fsdp2", drawn) == [None] * len(drawn)
    # It does not obey options of DeepSpeed, so they are not drawn.
    assert not any(case.options for case in drawn)


@pytest.mark.usefixtures("ranks")
def test_what_no_case_can_have_is_reported_when_the_test_starts() -> None:
    @UNHURRIED
    @given(cases("fsdp2", world_sizes=(2,), features=("transposed",)))
    def never(case: Case) -> None:
        raise AssertionError(case)

    with pytest.raises(UsageError, match=r"fsdp2: torch refuses parameters that are not contig"):
        never()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"implementation": "fsdp3"}, r"unknown implementation 'fsdp3'; did you mean 'fsdp2'\?"),
        ({"implementation": lambda: 0}, "is not at the top of its module"),
        ({"world_sizes": 3}, r"world_sizes takes a list: world_sizes=\[3\]"),
        ({"world_sizes": (0,)}, r"world size 0 is out of range \(allowed: 1 to 1024\)"),
        ({"features": "clip"}, r"features takes a list: features=\['clip'\]"),
        ({"features": ("clipp",)}, r"unknown feature 'clipp'; did you mean 'clip'\?"),
        ({"features": ("resume",)}, "is of cases with checkpoints, which cases"),
        ({"fixed": {"trainig": {}}}, "no field 'trainig'; did you mean 'training'"),
        ({"fixed": {"training": {"clip": -1}}}, "training.clip is -1; allowed: a number > 0"),
        ({"fixed": 3}, r"fixed is 3; needed are nested fields such as"),
        ({"model": "my_model.py:tiny"}, "'my_model.py:tiny' needs an implementation"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cases(**arguments)
