"""Strips of margins: every case lies on one scale, and the words say the same."""

from __future__ import annotations

import pytest
from hand_made import VIOLATION, case, finished, held, started
from msgspec.structs import replace

from zerocheck.report.html.margins import HIGHEST, LOWEST, WIDTH, bin_of, strips, ticks
from zerocheck.run.records.tally import tally


def test_what_holds_lies_left_of_the_middle_and_what_is_violated_right() -> None:
    wrong = case(1, status="violated", gradient="violated")
    assert wrong.judgement is not None
    judgement = replace(wrong.judgement, violations=(VIOLATION,))
    records = [started(), case(0), replace(wrong, judgement=judgement), finished(1)]
    gradient = next(one for one in strips(tally(records)) if one.obligation == "gradient")
    within = [one for one in gradient.bins if one.within]
    beyond = [one for one in gradient.bins if not one.within]
    assert within and all(one.x + one.width <= WIDTH / 2 for one in within)
    assert beyond and all(one.x >= WIDTH / 2 for one in beyond)
    assert gradient.words == (
        "1 held; errors are 0.25 of the bound in the median, 0.25 at most; "
        "1 violated, by 3e+07 times the bound at least"
    )


@pytest.mark.parametrize(
    ("share", "number"),
    [(1.0, -1), (0.99, -1), (0.32, -1), (0.31, -2), (0.1, -2), (0.099, -3), (3.2, 1), (1.01, 0)],
)
def test_half_decades(share: float, number: int) -> None:
    assert bin_of(share) == number
    assert 10 ** (number / 2) <= share <= 10 ** ((number + 1) / 2)


def test_what_is_beyond_the_scale_is_drawn_at_its_ends() -> None:
    records = [started(), case(0, share=1e-30), case(1, share=1e-30), case(2, share=0.5)]
    strip = strips(tally([*records, finished()]))[0]
    first, last = strip.bins
    assert (first.x, first.weight) == (0, 1.0) and last.weight < 1
    assert last.x + last.width == WIDTH / 2
    assert ticks() == ["10⁻¹⁰", "10⁻⁵", "1", "10⁵", "10¹⁰"]
    assert HIGHEST == -LOWEST


def test_an_obligation_without_a_bound_has_none() -> None:
    exact = [started(), case(0, share=0.0), finished()]
    assert strips(tally(exact)) == []
    assert strips(tally(held()))
