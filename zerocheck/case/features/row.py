"""One feature, and tables of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..schema import Case

Present = Callable[[Case], bool]


@dataclass(frozen=True)
class Feature:
    """Property of cases: `present(case)`. Features of one dimension are grouped.

    field: the field of `case.sharding`, or the name in `case.options`, that it tells of, which an
    implementation may ignore.
    """

    name: str
    title: str
    dimension: str
    present: Present
    field: str | None = None


def table(
    *rows: tuple[str, str, Present] | tuple[str, str, Present, str], dimension: str
) -> list[Feature]:
    """Return features of one dimension from rows of (name, title, present[, field])."""
    return [Feature(row[0], row[1], dimension, *row[2:]) for row in rows]
