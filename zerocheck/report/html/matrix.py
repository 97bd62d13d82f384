"""Conformance matrix, and the details of each of its cells."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...case.features import FEATURES
from ...protocol.verdicts import TITLES, Obligation, Status
from ...run.records.finding_text import number
from ...run.records.tally import FAILING, Cell, ImplementationTally, Tally

ENDS = "crash or hang"
"""Column of the cases that came to no verdict."""

SIGN_OF = {"bad": "✗", "known": "!", "good": "✓", "idle": "∅", "none": "–"}
"""Next to the colour, for those who do not see it, by the kind of a cell."""


@dataclass(frozen=True)
class CellView:
    """Cell of the matrix.

    kind: the class that gives its colour; count: cases of that kind, empty for none; words: all
    verdicts; share: of the bound.
    """

    obligation: str
    kind: str
    sign: str
    count: str
    words: str
    share: str


@dataclass(frozen=True)
class FeatureRow:
    """Cases of one feature, by obligation: words, and whether anything failed."""

    name: str
    title: str
    cells: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class MatrixRow:
    """One implementation. anchor: of its drill-down."""

    name: str
    anchor: str
    cells: tuple[CellView, ...]
    asked: tuple[str, ...]
    features: tuple[FeatureRow, ...]
    refused: tuple[tuple[str, int], ...]
    cases: int
    seconds: float


def titles(counted: Tally) -> dict[str, str]:
    """Map each obligation to its requirement in words."""
    ends = {ENDS: "every case comes to its end"}
    return ends | {obligation: TITLES[obligation] for obligation in counted.obligations}


def matrix(counted: Tally) -> list[MatrixRow]:
    """Return a row for each implementation."""
    return [
        _row(f"{number}-{_slug(name)}", name, implementation)
        for number, (name, implementation) in enumerate(counted.implementations.items())
    ]


def kind_of(status: Status) -> str:
    """Return the kind of a status: good, bad, known or none."""
    if status in FAILING:
        return "bad"
    return {"known": "known", "holds": "good"}.get(status, "none")


def _row(anchor: str, name: str, implementation: ImplementationTally) -> MatrixRow:
    asked = tuple(o for o, cell in implementation.cells.items() if cell.checked or cell.broken)
    return MatrixRow(
        name=name,
        anchor=anchor,
        cells=(
            _ended(implementation),
            *(_shown(o, cell) for o, cell in implementation.cells.items()),
        ),
        asked=asked,
        features=tuple(_features(implementation, asked)),
        refused=tuple((implementation.unsupported + implementation.unjudged).most_common()),
        cases=sum(implementation.cases.values()),
        seconds=implementation.seconds,
    )


def _ended(implementation: ImplementationTally) -> CellView:
    """Return the cell of cases that crashed or hung, after which no obligation could be checked."""
    new = implementation.cases["crashed"] + implementation.cases["hung"]
    known = implementation.known_crashes
    kind = "bad" if new else "known" if known else "good" if implementation.cases else "none"
    words = " and ".join(
        f"{count} {label}" for count, label in ((new, "new"), (known, "known")) if count
    )
    return CellView(ENDS, kind, SIGN_OF[kind], str(new or known or ""), words or "none", "–")


def _shown(obligation: Obligation, cell: Cell) -> CellView:
    """Return the cell of an obligation.

    Crashes and hangs, which all obligations have, stand in a cell of their own.
    """
    counts = {
        "bad": cell.counts["violated"],
        "known": cell.counts["known"] - cell.broken,
        "good": cell.counts["holds"] if cell.informative else 0,
        "idle": cell.counts["holds"],
    }
    kind, count = next((one for one in counts.items() if one[1]), ("none", 0))
    return CellView(
        obligation=obligation,
        kind=kind,
        sign=SIGN_OF[kind],
        count=str(count or ""),
        words=_words(cell, idle=kind == "idle"),
        share=number(cell.share, digits=3) if cell.checked else "–",
    )


def _words(cell: Cell, *, idle: bool) -> str:
    """Return all counts of a cell; crashes and hangs are not among them."""
    counts = {
        "violated": cell.counts["violated"],
        "known": cell.counts["known"] - cell.broken,
        "hold": cell.counts["holds"],
    }
    texts = [f"{count} {label}" for label, count in counts.items() if count]
    texts += [f"{cell.estimated} by an estimated bound"] if cell.estimated else []
    return (", ".join(texts) or "not exercised") + ("; it could fail in none" if idle else "")


def _features(
    implementation: ImplementationTally, asked: tuple[Obligation, ...]
) -> list[FeatureRow]:
    rows = []
    for name, feature in FEATURES.items():
        cells = tuple(_of_feature(implementation.cells[o], name) for o in asked)
        if any(kind in ("bad", "known") for kind, _ in cells):
            rows.append(FeatureRow(name, feature.title, cells))
    return rows


def _of_feature(cell: Cell, feature: str) -> tuple[str, str]:
    holds = cell.features[feature, "holds"]
    others = [(s, cell.features[feature, s]) for s in (*FAILING, "known")]
    found = [(status, count) for status, count in others if count]
    if not found:
        return ("good", str(holds)) if holds else ("none", "")
    words = ", ".join(f"{count} {status}" for status, count in found)
    return kind_of(found[0][0]), f"{holds}, {words}"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
