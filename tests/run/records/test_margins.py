"""Margins: bins of the share of the bound that was used, within it and beyond."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hand_made import VIOLATION, case
from msgspec.structs import replace

from zerocheck.protocol.verdicts import Judgement
from zerocheck.run.records.margins import Margins, bin_of


def judged(share: float | None, **given: object) -> Judgement:
    judgement = case(status="holds").judgement
    assert judgement is not None
    shares = {} if share is None else {"gradient": share}
    return replace(judgement, share=shares, **given)


@pytest.mark.parametrize(
    ("share", "number"),
    [(1.0, -1), (0.99, -1), (0.32, -1), (0.31, -2), (0.1, -2), (0.099, -3), (3.2, 1), (1.01, 0)],
)
def test_half_decades(share: float, number: int) -> None:
    assert bin_of(share) == number
    assert 10 ** (number / 2) <= share <= 10 ** ((number + 1) / 2)


def test_each_case_counts_once() -> None:
    margins = Margins()
    margins.add(judged(0.5), "gradient")
    margins.add(judged(0.0), "gradient")
    margins.add(judged(None), "gradient")
    assert (margins.within, margins.exact) == (Counter({-1: 1}), 1)
    worse = replace(VIOLATION, ratio=40.0)
    other = replace(VIOLATION, obligation="update", ratio=1e9)
    violated = {"gradient": "violated"}
    margins.add(judged(7.0, statuses=violated, violations=(VIOLATION, worse, other)), "gradient")
    assert margins.beyond == Counter({14: 1})  # 3e7
    for ratio in (math.inf, math.nan, None):
        one = (replace(VIOLATION, ratio=ratio),)
        margins.add(judged(7.0, statuses=violated, violations=one), "gradient")
    assert margins.infinite == 3 and margins.measured == 2
