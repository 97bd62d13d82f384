"""Free runs as two pictures: the losses, and the distance of parameters from the reference's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...run.records.records import Drift
from .. import drift as words

WIDTH, HEIGHT = 420, 200
"""Of a plotting area, in user units."""
GAP = 14
"""Below the lowest decade and above the highest, for 0 and for what is not finite."""
WHO = ("reference", "implementation", "replica")


@dataclass(frozen=True)
class Plot:
    """Picture of a free run.

    ticks: (height, label); lines: (who, points of a polyline, its dots).
    """

    name: str
    words: str
    ticks: tuple[tuple[float, str], ...]
    lines: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class DriftView:
    """Free run on the page.

    plots: none if it could not be taken; parts: where the violated step is, None if there is none;
    across: (place, number) of each step that has a label.
    """

    anchor: str
    title: str
    sentence: str
    plots: tuple[Plot, ...]
    across: tuple[tuple[float, str], ...]
    parts: float | None
    headers: tuple[str, ...]
    rows: list[list[str]]


def shown(number: int, drift: Drift) -> DriftView:
    """Return the `number`-th free run of the page."""
    steps = len(drift.expected)
    plots: tuple[Plot, ...] = ()
    if drift.own is not None and drift.replica is not None:
        losses = (drift.expected, drift.own.losses, drift.replica.losses)
        plots = (_losses(losses), _distances((drift.own.relative, drift.replica.relative)))
    every = max(1, math.ceil(steps / 10))
    inside = drift.parts is not None and drift.parts < steps
    return DriftView(
        anchor=f"drift-{number}",
        title=words.title(drift),
        sentence=words.sentence(drift),
        plots=plots,
        across=tuple((_across(n, steps), str(n)) for n in range(0, steps, every)),
        parts=_across(drift.parts or 0, steps) if inside else None,
        headers=words.HEADERS,
        rows=words.rows(drift),
    )


def _across(step: int, steps: int) -> float:
    return round(WIDTH * (step + 0.5) / max(steps, 1), 1)


def _losses(curves: Sequence[Sequence[float]]) -> Plot:
    """Plot the losses on a linear scale: they may be negative."""
    finite = [value for curve in curves for value in curve if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if low == high:
        low, high = low - (abs(low) or 1.0), high + (abs(high) or 1.0)

    def up(value: float) -> float:
        if not math.isfinite(value):
            return 0.0
        share = value / (high - low) - low / (high - low)
        return round(GAP + (HEIGHT - 2 * GAP) * (1 - share), 1)

    marks = [low + (high - low) * part / 4 for part in range(5)]
    ticks = tuple((up(mark), f"{mark:.3g}") for mark in marks)
    return Plot("loss", "loss per step", ticks, _lines(WHO, curves, up))


def _distances(curves: Sequence[Sequence[float]]) -> Plot:
    """Plot the distances on a logarithmic scale, 0 at the bottom and non-finite ones at the top."""
    known = [value for curve in curves for value in curve if 0 < value < math.inf] or [1e-8]
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    high = max(high, low + 1)

    def up(value: float) -> float:
        if not 0 < value < math.inf:
            return 0.0 if value else float(HEIGHT)
        share = (math.log10(value) - low) / (high - low)
        return round(GAP + (HEIGHT - 2 * GAP) * (1 - share), 1)

    every = max(1, math.ceil((high - low) / 6))
    ticks = [(up(10.0**power), f"1e{power}") for power in range(low, high + 1, every)]
    ticks += [(float(HEIGHT), "0")]
    if any(not math.isfinite(value) for curve in curves for value in curve):
        ticks += [(0.0, "inf")]
    label = (
        "distance of the parameters from those of the reference per step, on a logarithmic scale"
    )
    return Plot("relative drift", label, tuple(ticks), _lines(WHO[1:], curves, up))


def _lines(
    who: Sequence[str], curves: Sequence[Sequence[float]], up: Callable[[float], float]
) -> tuple[tuple[str, str], ...]:
    lines = []
    for name, curve in zip(who, curves, strict=True):
        points = ((_across(n, len(curve)), up(value)) for n, value in enumerate(curve))
        lines.append((name, " ".join(f"{x},{y}" for x, y in points)))
    return tuple(lines)
