"""Memory of a rank as three bands over N, by the formulas, next to measured values.

Bytes per parameter, so that models of any size fit in one picture. The formulas are those of the
ZeRO paper (run/records/footprint.py). The measured values are those of the largest case of each
implementation and number of ranks, its bytes over its elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ...run.records.footprint import STAGES, ideal
from ...run.records.tally import Tally

WIDTH, HEIGHT = 640, 240
"""Of the plotting area, in user units."""
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of ranks that the slider has, equally far apart."""
CATEGORIES = ("parameters", "gradients", "optimizer")
COPIES = {"fp32": (4, 4, 8), "mixed precision": (2, 2, 12)}
"""Bytes per parameter of one copy: section 3.1 of the paper."""
FORMULAS = {
    "fp32": ("16 Ψ", "8 Ψ + 8 Ψ/N", "4 Ψ + 12 Ψ/N", "16 Ψ/N"),
    "mixed precision": ("16 Ψ", "4 Ψ + 12 Ψ/N", "2 Ψ + 14 Ψ/N", "16 Ψ/N"),
}


@dataclass(frozen=True)
class Dot:
    """One measured implementation: bytes per parameter on so many ranks."""

    name: str
    ranks: int
    measured: float
    formula: float
    x: float
    y: float


@dataclass(frozen=True)
class Chart:
    """Chart of one stage in one precision.

    bands: (category, points of its polygon); steps[n]: the bytes of each category on RANKS[n].
    """

    stage: int
    precision: str
    formula: str
    bands: tuple[tuple[str, str], ...]
    steps: tuple[tuple[float, ...], ...]
    dots: tuple[Dot, ...]


def charts(counted: Tally) -> list[Chart]:
    """Return a chart for each precision and stage."""
    measured = list(_measured(counted))
    top = max([16.0, *(dot[2] for dot in measured)])
    return [
        _chart(stage, precision, copy, measured if precision == "fp32" else [], top)
        for precision, copy in COPIES.items()
        for stage in STAGES
    ]


def ticks(counted: Tally) -> list[tuple[float, str]]:
    """Return (height, label) of the lines behind all charts."""
    top = max([16.0, *(dot[2] for dot in _measured(counted))])
    step = 4 if top <= 32 else 16
    return [(_up(value, top), str(value)) for value in range(0, int(top) + 1, step)]


def across(ranks: int) -> float:
    """Return the horizontal position of a number of ranks, interpolated between the slider's."""
    place = 0.0
    for number, (low, high) in enumerate(pairwise(RANKS)):
        if ranks >= high:
            place = number + 1.0
        elif ranks > low:
            place = number + (ranks - low) / (high - low)
    return round(WIDTH * place / (len(RANKS) - 1), 1)


def _up(value: float, top: float) -> float:
    return round(HEIGHT * (1 - value / top), 1)


def _chart(
    stage: int,
    precision: str,
    copy: tuple[int, int, int],
    measured: list[tuple[str, int, float, float, int]],
    top: float,
) -> Chart:
    steps = []
    for ranks in RANKS:
        parts = [tuple(b if n == k else 0 for n, b in enumerate(copy)) for k in range(3)]
        steps.append(tuple(ideal(part, ranks, stage) for part in parts))  # type: ignore[arg-type]
    heights = [list(accumulate(step, initial=0.0)) for step in steps]
    bands = []
    for number, category in enumerate(CATEGORIES):
        over = [(across(r), _up(h[number + 1], top)) for r, h in zip(RANKS, heights, strict=True)]
        under = [(across(r), _up(h[number], top)) for r, h in zip(RANKS, heights, strict=True)]
        bands.append((category, " ".join(f"{x},{y}" for x, y in over + under[::-1])))
    dots = tuple(
        Dot(name, ranks, held, wanted, across(ranks), _up(held, top))
        for name, ranks, held, wanted, model in measured
        if model == stage and ranks <= RANKS[-1]
    )
    return Chart(stage, precision, FORMULAS[precision][stage], tuple(bands), tuple(steps), dots)


def _measured(counted: Tally) -> Iterator[tuple[str, int, float, float, int]]:
    """Yield (implementation, ranks, bytes per parameter, by the formula, stage)."""
    for name, implementation in counted.implementations.items():
        for ranks in sorted(implementation.weights):
            one = implementation.weights[ranks]
            elements = one.largest.elements
            if elements:
                wanted = ideal(one.largest.copy, ranks, one.stage)
                yield name, ranks, one.largest.held / elements, wanted / elements, one.stage
