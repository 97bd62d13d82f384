"""Heat map of the coverage: feature by implementation."""

from __future__ import annotations

from dataclasses import dataclass

from ...run.records.coverage import COULD_NOT_FAIL, CRASHED_ONLY, REFUSED_ONLY
from ...run.records.tally import FAILING, ImplementationTally, Tally
from ..coverage import feature_rows

SIGNS = {
    "not drawn": "–",
    "left out": "–",
    COULD_NOT_FAIL: "∅",
    "refused": "⊘",
    REFUSED_ONLY: "⊘",
    CRASHED_ONLY: "0",
    "ignored": "○",
}
"""In place of the number of cases, where there is none."""

LEGEND = (
    "0: its cases crashed or hung; –: no case was drawn; ∅: it could break nothing in the cases "
    "that had it; ⊘: the implementation refuses it; ○: it ignores it"
)


@dataclass(frozen=True)
class HeatRow:
    """One feature. cells: (kind, which gives the colour; words) for each implementation."""

    name: str
    title: str
    cells: tuple[tuple[str, str], ...]


def heat_rows(counted: Tally) -> list[HeatRow]:
    """Return a row for each feature that was wanted."""
    every = list(counted.implementations.values())
    return [
        HeatRow(
            name,
            title,
            tuple(
                (_kind(one, name), SIGNS.get(words, words))
                for one, words in zip(every, cells, strict=True)
            ),
        )
        for name, title, *cells in feature_rows(counted)
    ]


def _kind(implementation: ImplementationTally, feature: str) -> str:
    """Return the kind of the worst that a case with the feature showed."""
    cells = implementation.cells.values()
    if any(cell.features[feature, status] for cell in cells for status in FAILING):
        return "bad"
    if any(cell.features[feature, "known"] for cell in cells):
        return "known"
    return "good" if implementation.covered.exercised[feature] else "none"
