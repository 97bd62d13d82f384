"""Strips of how near to its bound each case came, on one scale for all obligations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ...run.records.margins import PER_DECADE, Margins
from ...run.records.tally import Tally

WIDTH, HEIGHT = 600, 18
"""Of a strip, in user units."""
LOWEST, HIGHEST = -8, 8
"""Powers of ten at the ends; what is beyond them is drawn at the end."""


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
            margins = implementation.cells[obligation].margins
            whole.within += margins.within
            whole.beyond += margins.beyond
            whole.exact += margins.exact
            whole.infinite += margins.infinite
        if whole.measured:
            found.append(MarginStrip(obligation, tuple(_bins(whole)), _words(whole)))
    return found


def ticks() -> list[tuple[float, str]]:
    """Return (x, label) of every second power of ten."""
    return [(_x(PER_DECADE * power), _power(power)) for power in range(LOWEST, HIGHEST + 1, 2)]


def _bins(margins: Margins) -> list[MarginBin]:
    width = _x(1) - _x(0)
    return [
        MarginBin(round(_x(number), 1), round(width, 1), within, round(0.25 + 0.75 * share, 2))
        for within, counts in ((True, margins.within), (False, margins.beyond))
        for number, share in _weights(counts).items()
    ]


def _weights(counts: Counter[int]) -> dict[int, float]:
    kept: Counter[int] = Counter()
    for number, count in counts.items():
        lowest, highest = PER_DECADE * LOWEST, PER_DECADE * HIGHEST - 1
        kept[min(max(number, lowest), highest)] += count
    most = max(kept.values(), default=1)
    return {number: count / most for number, count in sorted(kept.items())}


def _x(number: int) -> float:
    return WIDTH * (number - PER_DECADE * LOWEST) / (PER_DECADE * (HIGHEST - LOWEST))


def _words(margins: Margins) -> str:
    """Describe a strip: where the middle and the last of the passing cases lie."""
    parts = []
    if margins.within:
        order = sorted(margins.within.elements())
        middle, last = order[len(order) // 2], order[-1]
        parts.append(
            f"{len(order)} cases within the bound, the middle one {_times(middle + 1)} of it at "
            f"most, the nearest {_times(last + 1)}"
        )
    if margins.exact:
        parts.append(f"{margins.exact} without any error")
    if margins.beyond:
        first = min(margins.beyond)
        count = margins.beyond.total()
        parts.append(f"{count} violated, all by {_times(first)} times the bound or more")
    if margins.infinite:
        parts.append(f"{margins.infinite} violated without a ratio")
    return "; ".join(parts)


def _times(number: int) -> str:
    """Format the lower edge of a bin."""
    value = 10 ** (number / PER_DECADE)
    return f"{value:.2g}" if value < 1000 else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")


def _power(power: int) -> str:
    raised = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return "1" if power == 0 else f"10{raised}"
