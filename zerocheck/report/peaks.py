"""Page and picture of a step's peak memory over wrapping, prefetching and buckets."""

from __future__ import annotations

from collections.abc import Sequence

import jinja2
from tabulate import tabulate

from ..protocol.layout import Term
from ..run.records.peaks import CASE, Point, Terms

WIDTH, HEIGHT = 300, 240
"""Of the plotting area of one panel, in user units."""

COLOURS = ("#0a7", "#c50", "#06c", "#a3a", "#666")


def markdown(windows: Sequence[Point], buckets: Sequence[Point], stages: Sequence[Terms]) -> str:
    """Render the page. windows: over units and prefetching; buckets: over their size."""
    worst = max((*windows, *buckets), key=lambda point: point.off)
    exact = sum(point.off == 0 for point in (*windows, *buckets))
    return (
        _environment()
        .get_template("peaks.md.j2")
        .render(
            worst=worst,
            exact=exact,
            points=len(windows) + len(buckets),
            ranks=CASE.world_size,
            batch=CASE.data.batch,
            length=CASE.data.length,
            blocks=len(CASE.model.blocks),
            windows=_table(windows, "prefetch", "gathered"),
            buckets=_table(buckets, "elements", "bucket"),
            stages=_stages(stages),
        )
    )


def picture(windows: Sequence[Point], buckets: Sequence[Point]) -> str:
    """Draw the curves as SVG: lines are predicted, dots are measured."""
    panels = [
        _panel(name, [one for one in windows if one.implementation == name], "prefetch")
        for name in dict.fromkeys(one.implementation for one in windows)
    ]
    panels.append(_panel(buckets[0].implementation, buckets, "elements of a bucket"))
    return (
        _environment()
        .get_template("peaks.svg.j2")
        .render(panels=panels, width=WIDTH, height=HEIGHT)
    )


def _panel(name: str, points: Sequence[Point], axis: str) -> dict[str, object]:
    xs = list(dict.fromkeys(point.x for point in points))
    top = max(max(point.predicted, point.measured) for point in points) * 1.05
    low = min(min(point.predicted, point.measured) for point in points) * 0.95

    def across(x: int) -> float:
        return round(WIDTH * xs.index(x) / max(1, len(xs) - 1), 1)

    def up(size: int) -> float:
        return round(HEIGHT * (top - size) / (top - low), 1)

    curves = []
    for colour, curve in zip(COLOURS, dict.fromkeys(one.curve for one in points), strict=False):
        of_curve = [point for point in points if point.curve == curve]
        curves.append(
            {
                "name": curve,
                "colour": colour,
                "line": [(across(one.x), up(one.predicted)) for one in of_curve],
                "dots": [(across(one.x), up(one.measured)) for one in of_curve],
            }
        )
    rows = [low + (top - low) * part / 4 for part in range(5)]
    return {
        "title": name,
        "axis": axis,
        "ticks": [(across(x), x) for x in xs],
        "rows": [(up(round(row)), f"{row / 1000:.0f}") for row in rows],
        "curves": curves,
    }


def _table(points: Sequence[Point], axis: str, term: Term) -> str:
    rows = [
        [
            one.implementation,
            one.curve,
            one.x,
            f"{one.predicted:,}",
            f"{one.measured:,}",
            f"{one.off:.3%}",
            f"{one.highest.get(term, 0):,}",
        ]
        for one in points
    ]
    headers = ["implementation", "units", axis, "predicted", "measured", "off", f"most {term}"]
    return str(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


def _stages(stages: Sequence[Terms]) -> str:
    rows = [
        [
            one.implementation,
            "yes" if one.checkpointed else "no",
            f"{one.activation:,}",
            f"{one.lasting:,}",
            f"{one.peak:,}",
        ]
        for one in stages
    ]
    headers = ["implementation", "checkpointed", "activation", "lasting", "peak"]
    return str(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("zerocheck.report", "."),
        autoescape=jinja2.select_autoescape(["svg.j2"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
