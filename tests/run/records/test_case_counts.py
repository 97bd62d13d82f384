"""A summary counts each case once, so its numbers add up."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerocheck.protocol.verdicts import STATUSES
from zerocheck.run.records.case_counts import WORDS, outcomes, unsupported_lines


def test_every_status_has_a_word() -> None:
    assert {*WORDS} == {*STATUSES}
    assert len({*WORDS.values()}) == len(WORDS)


@given(st.dictionaries(st.sampled_from(STATUSES), st.integers(0, 5000)), st.integers(0, 6000))
def test_the_numbers_add_up(cases: dict[str, int], planned: int) -> None:
    head, _, rest = outcomes(cases, planned).replace(",", "").partition(": ")  # type: ignore[arg-type]
    total, *announced = map(int, re.findall(r"\d+", head))
    assert total == sum(cases.values())
    assert sum(map(int, re.findall(r"\d+", rest))) == total
    assert not announced or (announced[0] == planned and sum(announced) == total)


@pytest.mark.parametrize(
    ("cases", "planned", "text"),
    [
        ({"holds": 34, "unsupported": 17}, 48, "51 cases (48 planned, 3 added): 34 passed, 17 "),
        ({"holds": 1}, 1, "1 case: 1 passed"),
        ({"holds": 1, "violated": 2}, 9, "3 cases: 2 violated, 1 passed"),
        ({}, 0, "0 cases"),
    ],
)
def test_outcomes(cases: dict[str, int], planned: int, text: str) -> None:
    assert outcomes(cases, planned).startswith(text)  # type: ignore[arg-type]


def test_the_commonest_reasons_are_named() -> None:
    """Those that differ in a name or a shape are one."""
    reasons = [
        Counter({"no norms": 5, "no ties": 1, "no shape [3, 1]": 1, "no biases": 1}),
        Counter({"no 0-d": 3, "no ties": 1, "no shape [2]": 3, "no dtype": 1}),
    ]
    assert unsupported_lines(reasons) == [
        "5 cases unsupported: no norms",
        "4 cases unsupported: no shape [2]",
        "3 cases unsupported: no 0-d",
        "2 cases unsupported: no ties",
        "2 cases unsupported for other reasons",
    ]
    assert unsupported_lines([Counter()]) == []
