"""Curves as one SVG file: panels side by side, both axes logarithmic, one legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

WIDTH, HEIGHT = 300, 240
"""Of the plotting area of one panel, in user units."""


@dataclass(frozen=True)
class Curve:
    """Points (x, y), all positive; style: class names for the style sheet in the template."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str


@dataclass(frozen=True)
class Panel:
    """Curves over one x axis; ticks: where it is labelled."""

    title: str
    ticks: Sequence[float]
    curves: Sequence[Curve]


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    length: float
    flipped: bool = False

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.length * (1 - share if self.flipped else share), 1)


def draw(panels: Sequence[Panel]) -> str:
    """The picture. All panels share the y axis, from one power of ten to another."""
    values = [y for panel in panels for curve in panel.curves for _, y in curve.points]
    decades = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    y = _Scale(10.0 ** decades[0], 10.0 ** decades[-1], HEIGHT, flipped=True)
    shown = [
        {
            "title": panel.title,
            "x": _Scale(min(panel.ticks), max(panel.ticks), WIDTH),
            "ticks": panel.ticks,
            "curves": panel.curves,
        }
        for panel in panels
    ]
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=folder,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("curves.svg.j2").render(
        panels=shown, y=y, rows=[10.0**exponent for exponent in decades], width=WIDTH, height=HEIGHT
    )
