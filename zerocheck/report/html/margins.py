"""Strips of how near to its bound each case came, on one scale for all obligations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from ...run.records.margins import Margins
from ...run.records.tally import Tally

WIDTH, HEIGHT = 600, 18
"""Size of a strip, in user units."""
LOWEST, HIGHEST = -10, 10
"""Powers of ten at the ends; what is beyond them is drawn at the end."""
EVERY = 5
"""Decades between two labels."""
PER_DECADE = 2
"""Bins in each power of ten."""


@dataclass(frozen=True)
class MarginBin:
    """Bin of a strip. within: of cases that hold; weight: 0 to 1, of the fullest bin."""

    x: float
    width: float
    within: bool
    weight: float


@dataclass(frozen=True)
class MarginStrip:
    """Strip of one obligation. words: the same for those who do not see it."""

    obligation: str
    bins: tuple[MarginBin, ...]
    words: str


def strips(counted: Tally) -> list[MarginStrip]:
    """Return a strip for each obligation that has a bound, over all implementations."""
    found = []
    for obligation in counted.obligations:
        whole = Margins()
        for implementation in counted.implementations.values():
            whole.extend(implementation.cells[obligation].margins)
        if whole.within or whole.beyond:
            found.append(MarginStrip(obligation, tuple(_bins(whole)), _words(whole)))
    return found


def ticks() -> list[str]:
    """Return labels at equal distances, from the left end of the scale to the right one."""
    return [_power(power) for power in range(LOWEST, HIGHEST + 1, EVERY)]


def bin_of(share: float) -> int:
    """Return the half decade of a share; what is beyond the scale is in the one at its end.

    The edge of the bound belongs to the last bin within it.
    """
    number = -1 if share == 1.0 else math.floor(PER_DECADE * math.log10(share))
    return min(max(number, PER_DECADE * LOWEST), PER_DECADE * HIGHEST - 1)


def _bins(margins: Margins) -> Iterator[MarginBin]:
    width = round(_x(1) - _x(0), 1)
    for within, shares in ((True, margins.within), (False, margins.beyond)):
        counts = Counter(map(bin_of, shares))
        most = max(counts.values(), default=1)
        for number, count in sorted(counts.items()):
            weight = 0.25 + 0.75 * count / most
            yield MarginBin(round(_x(number), 1), width, within, round(weight, 2))


def _x(number: int) -> float:
    return WIDTH * (number - PER_DECADE * LOWEST) / (PER_DECADE * (HIGHEST - LOWEST))


def _words(margins: Margins) -> str:
    """Describe a strip: its middle, and the cases nearest to the bound on both sides."""
    parts = []
    passing = len(margins.within) + margins.exact
    if passing:
        text = f"{passing} held"
        if margins.exact:
            text += f", {margins.exact} of them without any error"
        if margins.within:
            middle, nearest = median(margins.within), max(margins.within)
            text += f"; errors are {middle:.2g} of the bound in the median, {nearest:.3g} at most"
        parts.append(text)
    if margins.beyond:
        count, first = len(margins.beyond), min(margins.beyond)
        parts.append(f"{count} violated, by {first:.2g} times the bound at least")
    if margins.unmeasured:
        parts.append(f"{margins.unmeasured} violated where it must be exact, or finite")
    return "; ".join(parts)


def _power(power: int) -> str:
    raised = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return "1" if power == 0 else f"10{raised}"
