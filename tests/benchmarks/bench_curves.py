"""Cases per second against the number of ranks, steps and model size, drawn beside the kept rival.

zerocheck judges every obligation at every step; the rival compares losses and final parameters.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from benchmarks.bench_speed import rival
from benchmarks.drawing import Curve, Panel, draw
from benchmarks.measuring import Show, statuses_of, table, warm_pool
from benchmarks.rival_swept import SHARDERS, STEPS, USUAL, WIDTHS, WORLD_SIZES

from zerocheck.case.schema import Block, Case, Data, Model, Sharding, Training
from zerocheck.ranks.pool import Pool
from zerocheck.run.plan.plan import PlannedCase

ROUNDS = 3
TARGET_RATIO = 2.0
PICTURE = Path(__file__).with_name("cases-per-second.svg")

AXES = {
    "world": ("ranks", WORLD_SIZES),
    "steps": ("steps of a case", STEPS),
    "width": ("parameters of the model", WIDTHS),
}
Point = tuple[str, int, int, int]
"""(implementation, ranks, steps, width)"""


def _points() -> list[Point]:
    """Every point of every curve, once."""
    points = {}
    for name in SHARDERS:
        for axis, (_, values) in AXES.items():
            for value in values:
                points[_point(name, axis, value)] = None
    return list(points)


def _point(name: str, axis: str, value: int) -> Point:
    at = {**USUAL, axis: value}
    return name, at["world"], at["steps"], at["width"]


def _case(point: Point, seed: int) -> Case:
    """7-width-width-3; the middle layer is a convolution of kernel 1, which is a Linear."""
    _, world, steps, width = point
    return Case(
        mesh=(world,),
        seed=seed,
        model=Model(inputs=7, width=width, blocks=(Block(kind="conv", kernel=1),), outputs=3),
        data=Data(batch=4, length=1),
        training=Training(steps=steps),
        sharding=Sharding(wrap="layer"),
    )


def _per_round(point: Point) -> int:
    """Cases of zerocheck's in each round, one behind the other as in a run; their mean counts.

    The judge has nothing to do at first and the ranks nothing at last, which a run has once and not
    in each round. With many ranks that is little.
    """
    return 12 if point[1] <= 4 else 4


def _parameters(width: int) -> int:
    return 8 * width + width * (width + 1) + 3 * (width + 1)


def _ours(pool: Pool, point: Point) -> float:
    """Cases per second, the median of the rounds after one that warms up."""
    rates = []
    count = _per_round(point)
    for number in range(ROUNDS + 1):
        first = 1 + number * count  # no case twice
        cases = [PlannedCase(point[0], _case(point, first + i)) for i in range(count)]
        started = time.perf_counter()
        assert set(statuses_of(pool, cases)) == {"holds"}
        rates.append(count / (time.perf_counter() - started))
    return statistics.median(rates[1:])


def test_curves(show: Show) -> None:
    """Draws the picture, prints its figures, holds the ratio of cases per second over all points.

    Every point is one case of either, so cases per second of all of them are to each other as the
    inverse of the summed times. The median of the points' own ratios is printed beside it: more
    than half of them have one or two ranks.
    """
    with warm_pool() as pool:
        ours = {point: _ours(pool, point) for point in _points()}
    seconds = rival("rival_swept", ROUNDS + 1)
    theirs = {point: 1 / statistics.median(seconds[_method(point)][1:]) for point in _points()}
    rows = [
        [
            f"{name}, {world} ranks, {steps} steps, {_parameters(width)} parameters",
            f"{theirs[name, world, steps, width]:.1f}",
            f"{ours[name, world, steps, width]:.1f}",
            f"{ours[name, world, steps, width] / theirs[name, world, steps, width]:.1f}",
        ]
        for name, world, steps, width in _points()
    ]
    ratios = [ours[point] / theirs[point] for point in _points()]
    sums = [sum(1 / rates[point] for point in _points()) for rates in (theirs, ours)]
    title = (
        f"Cases per second, median of {ROUNDS} rounds; all points together {sums[0] / sums[1]:.1f} "
        f"times, median of the points {statistics.median(ratios):.2f}"
    )
    show(table(title, ["", "MultiProcContinuousTest", "zerocheck", "ratio"], rows))
    PICTURE.write_text(draw([_panel(axis, ours, theirs) for axis in AXES]))
    assert sums[0] / sums[1] >= TARGET_RATIO


def _method(point: Point) -> str:
    name, world, steps, width = point
    return f"Swept{world}.test_{name}_s{steps}_w{width}"


def _panel(axis: str, ours: dict[Point, float], theirs: dict[Point, float]) -> Panel:
    title, values = AXES[axis]
    xs = [_parameters(value) if axis == "width" else value for value in values]
    curves = [
        Curve(
            f"{who}, {name}",
            [(x, rates[_point(name, axis, value)]) for x, value in zip(xs, values, strict=True)],
            style=f"{name} {kind}",
        )
        for who, kind, rates in (
            ("zerocheck", "ours", ours),
            ("MultiProcContinuousTest", "rival", theirs),
        )
        for name in SHARDERS
    ]
    return Panel(title, xs, curves)
