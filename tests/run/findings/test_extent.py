"""The sentence on what a bug needs, held against all failing cases of the run."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from zerocheck.case.reductions import left
from zerocheck.case.schema import Case, Data, Training
from zerocheck.protocol.verdicts import Violation
from zerocheck.run.findings.contrast import WrongCase
from zerocheck.run.findings.extent import Tried, extent, size

ONE_STEP = Training(steps=1)
SMALLEST = Case(mesh=(3,), training=replace(ONE_STEP, microbatches=2))
TWO_RANKS = replace(SMALLEST, mesh=(2,))
AT_ONCE = replace(SMALLEST, training=ONE_STEP)
RIGHT = Case(mesh=(1,), training=ONE_STEP)


def violation(step: int = 0) -> Violation:
    return Violation(
        obligation="gradient", step=step, role="", tensors=(), ranks=(), explanation=""
    )


def sentence(smallest: Case, *wrong: WrongCase, step: int = 0, right: tuple[Case, ...] = ()) -> str:
    tried = Tried((WrongCase(smallest, (), step), *wrong), right)
    return extent(smallest, left(smallest), violation(step), tried=tried)


def test_what_all_failing_cases_have() -> None:
    text = "only with several microbatches, from 3 ranks on"
    assert sentence(SMALLEST) == text
    larger = replace(SMALLEST, mesh=(4,), data=Data(batch=3))
    assert sentence(SMALLEST, WrongCase(larger)) == text


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            TWO_RANKS,
            "only with several microbatches; the smallest case only from 3 ranks on, unlike 1 of "
            "the 2 failing cases",
        ),
        (
            AT_ONCE,
            "only from 3 ranks on; the smallest case only with several microbatches, unlike 1 of "
            "the 2 failing cases",
        ),
        (
            RIGHT,
            "the smallest case only with several microbatches, from 3 ranks on, unlike 1 of the 2 "
            "failing cases",
        ),
    ],
)
def test_what_another_failing_case_lacks(other: Case, text: str) -> None:
    """Each of several features may be enough: without this one another case failed."""
    assert sentence(SMALLEST, WrongCase(other)) == text


def test_two_ranks_are_said_only_if_a_case_fails_on_one() -> None:
    smallest = Case(mesh=(2,), training=ONE_STEP)
    assert sentence(smallest) == "with all options at their default"
    assert sentence(smallest, WrongCase(RIGHT)) == (
        "the smallest case only from 2 ranks on, unlike 1 of the 2 failing cases"
    )


def test_a_later_step() -> None:
    smallest = Case(mesh=(2,), training=Training(steps=2))
    one_step = replace(smallest, training=ONE_STEP)
    # What holds with fewer steps is no contrast: the step is named.
    text = "only from the second step on"
    assert sentence(smallest, step=1, right=(one_step, one_step)) == text
    assert sentence(smallest, WrongCase(smallest, (), 0), step=1) == (
        f"the smallest case {text}, unlike 1 of the 2 failing cases"
    )


def test_a_forward_and_backward_follow_the_last_step() -> None:
    case = Case(mesh=(2,), training=ONE_STEP)
    assert size(case, violation(0)) == size(case) == "2 ranks, no blocks, 1 step"
    text = "2 ranks, no blocks, 1 step and the forward and backward of the next"
    assert size(case, violation(1)) == text
