"""Margins: shares of the bound of cases that hold, and ratios of those that do not."""

from __future__ import annotations

import math

from hand_made import VIOLATION, case
from msgspec.structs import replace

from zerocheck.protocol.verdicts import Judgement
from zerocheck.run.records.margins import Margins


def judged(share: float | None, **given: object) -> Judgement:
    judgement = case(status="holds").judgement
    assert judgement is not None
    shares = {} if share is None else {"gradient": share}
    return replace(judgement, share=shares, **given)


def test_each_case_counts_once() -> None:
    margins = Margins()
    margins.add(judged(0.5), "gradient")
    margins.add(judged(0.0), "gradient")
    margins.add(judged(None), "gradient")
    assert (list(margins.within), margins.exact) == ([0.5], 1)
    worse = replace(VIOLATION, ratio=40.0)
    other = replace(VIOLATION, obligation="update", ratio=1e9)
    violated = {"gradient": "violated"}
    both = (VIOLATION, worse, other)
    margins.add(judged(7.0, statuses=violated, violations=both), "gradient")
    assert list(margins.beyond) == [VIOLATION.ratio]
    for ratio in (math.inf, math.nan, None):
        one = (replace(VIOLATION, ratio=ratio),)
        margins.add(judged(7.0, statuses=violated, violations=one), "gradient")
    assert margins.unmeasured == 3
    whole = Margins()
    whole.extend(margins)
    whole.extend(margins)
    assert (len(whole.within), len(whole.beyond)) == (2, 2)
    assert (whole.exact, whole.unmeasured) == (2, 6)
