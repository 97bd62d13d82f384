"""Margins of an obligation: how near to its bound each case came. A share of 1 is the edge."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

from ...protocol.verdicts import Judgement, Obligation


@dataclass
class Margins:
    """Shares of the bound, by case.

    within: of cases in which the obligation holds with an error; beyond: of violated ones, the
    largest ratio; exact: cases that hold without any error; unmeasured: violated ones without a
    finite ratio, since the value is not finite or must be exact.
    """

    within: array[float] = field(default_factory=lambda: array("d"))
    beyond: array[float] = field(default_factory=lambda: array("d"))
    exact: int = 0
    unmeasured: int = 0

    def add(self, judgement: Judgement, obligation: Obligation) -> None:
        """Count one case."""
        status = judgement.statuses.get(obligation)
        if status == "holds" and obligation in judgement.share:
            share = judgement.share[obligation]
            if share > 0 and math.isfinite(share):
                self.within.append(min(share, 1.0))
            else:
                self.exact += share == 0
        elif status == "violated":
            every = [one for one in judgement.violations if one.obligation == obligation]
            ratios = [one.ratio for one in every if one.ratio is not None]
            finite = [one for one in ratios if math.isfinite(one) and one > 0]
            if finite:
                self.beyond.append(max(finite))
            else:
                self.unmeasured += 1

    def extend(self, other: Margins) -> None:
        """Add the cases of another implementation."""
        self.within.extend(other.within)
        self.beyond.extend(other.beyond)
        self.exact += other.exact
        self.unmeasured += other.unmeasured
