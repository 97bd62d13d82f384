"""Margins of an obligation: how near to its bound each case came, in half decades.

A share of 1 is the edge of the bound. Shares are counted and not kept: a run has thousands.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from ...protocol.verdicts import Judgement, Obligation

PER_DECADE = 2
"""Bins in each power of ten."""


@dataclass
class Margins:
    """Cases by the bin of their share of the bound: bin b holds 10^(b/2) up to 10^((b+1)/2).

    within: cases in which the obligation holds; beyond: violated ones, by the largest error;
    exact: cases in which it holds without any error; infinite: violated ones without a finite
    ratio, such as NaN or a bound of 0.
    """

    within: Counter[int] = field(default_factory=Counter)
    beyond: Counter[int] = field(default_factory=Counter)
    exact: int = 0
    infinite: int = 0

    @property
    def measured(self) -> int:
        """Number of cases with a share that can be drawn."""
        return self.within.total() + self.beyond.total()

    def add(self, judgement: Judgement, obligation: Obligation) -> None:
        """Count one case."""
        status = judgement.statuses.get(obligation)
        if status == "holds" and obligation in judgement.share:
            share = judgement.share[obligation]
            if share > 0 and math.isfinite(share):
                self.within[bin_of(min(share, 1.0))] += 1
            else:
                self.exact += share == 0
        elif status == "violated":
            every = [one for one in judgement.violations if one.obligation == obligation]
            ratios = [one.ratio for one in every if one.ratio is not None]
            finite = [one for one in ratios if math.isfinite(one) and one > 0]
            if finite:
                self.beyond[bin_of(max(finite))] += 1
            else:
                self.infinite += 1


def bin_of(share: float) -> int:
    """Return the bin of a share. The edge of the bound belongs to the last bin within it."""
    number = math.floor(PER_DECADE * math.log10(share))
    return -1 if share == 1.0 else number
