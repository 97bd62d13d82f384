"""Plots of the history of runs: cases, findings, known faults, margin and seconds."""

from __future__ import annotations

from dataclasses import dataclass

from ..history import PastRun, RunChange, changes

WIDTH, HEIGHT = 220, 60
"""Size of one plot, in user units."""

FIGURES = ("cases", "findings", "known faults", "nearest to a bound", "seconds")


@dataclass(frozen=True)
class HistoryPlot:
    """One figure over the runs. points: of a polyline; last: the latest value, in words."""

    name: str
    points: str
    dots: tuple[tuple[float, float], ...]
    last: str


@dataclass(frozen=True)
class HistoryView:
    """History on the page: plots, the same as a table, and what changed."""

    plots: tuple[HistoryPlot, ...]
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    changes: tuple[RunChange, ...]


def history_view(runs: list[PastRun]) -> HistoryView | None:
    """Return the history of at least two runs, the oldest first; None of fewer."""
    if len(runs) < 2:
        return None
    values = [_figures(one) for one in runs]
    plots = [
        _plot(name, [row[number] for row in values], _words(values[-1])[number])
        for number, name in enumerate(FIGURES)
    ]
    rows = tuple((one.when, one.torch, *_words(_figures(one))) for one in reversed(runs))
    return HistoryView(tuple(plots), ("run", "torch", *FIGURES), rows, tuple(changes(runs)))


def _figures(one: PastRun) -> tuple[float, ...]:
    return one.cases, len(one.findings), len(one.faults), one.nearest, one.seconds


def _words(figures: tuple[float, ...]) -> tuple[str, ...]:
    cases, findings, faults, nearest, seconds = figures
    return f"{cases:,}", f"{findings}", f"{faults}", f"{nearest:.3g}", f"{seconds:.0f}"


def _plot(name: str, values: list[float], last: str) -> HistoryPlot:
    """Plot values from 0 to their maximum."""
    most = max(values) or 1.0
    step = WIDTH / (len(values) - 1)
    dots = tuple(
        (round(number * step, 1), round(HEIGHT * (1 - value / most), 1))
        for number, value in enumerate(values)
    )
    return HistoryPlot(name, " ".join(f"{x},{y}" for x, y in dots), dots, last)
