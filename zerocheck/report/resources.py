"""Peak memory of measured cases, and seconds of saves and loads."""

from __future__ import annotations

from statistics import median
from typing import Any

from ..run.records.tally import ImplementationTally

PEAK_TITLE = "The most that a rank held at any instant of a step"
PEAK_HEADERS = ("implementation", "ranks", "cases measured", "median, bytes", "most, bytes")
CHECKPOINT_TITLE = "Checkpoint times"
CHECKPOINT_HEADERS = ("implementation", "saves", "median, s", "loads", "median, s")

Implementations = dict[str, ImplementationTally]


def peak_rows(implementations: Implementations) -> list[list[str]]:
    """Return peak bytes of measured cases, a row for each implementation and number of ranks."""
    return [
        [name, str(ranks), str(len(sizes)), f"{median(sizes):,.0f}", f"{max(sizes):,}"]
        for name, implementation in implementations.items()
        for ranks, sizes in sorted(implementation.peaks.items())
    ]


def checkpoint_rows(implementations: Implementations) -> list[list[str]]:
    """Return seconds of saves and loads, for implementations that have any."""
    return [
        [name, *_seconds(i.save_seconds), *_seconds(i.load_seconds)]
        for name, i in implementations.items()
        if i.save_seconds or i.load_seconds
    ]


def _seconds(values: list[float]) -> list[str]:
    return [str(len(values)), f"{median(values):.3g}" if values else "–"]


def as_data(implementation: ImplementationTally) -> dict[str, Any]:
    """Return the figures for the JSON report."""
    return {
        "measured_peaks": [
            {"world_size": ranks, "cases": len(sizes), "median": median(sizes), "most": max(sizes)}
            for ranks, sizes in sorted(implementation.peaks.items())
        ],
        "save_seconds": _statistics(implementation.save_seconds),
        "load_seconds": _statistics(implementation.load_seconds),
    }


def _statistics(values: list[float]) -> dict[str, Any]:
    return {"count": len(values), "median": median(values) if values else None}
