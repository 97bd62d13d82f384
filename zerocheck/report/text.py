"""Text of a cell of the matrix, in the same words on the console and in every report."""

from __future__ import annotations

from ..protocol.verdicts import Status
from ..run.records.tally import FAILING, Cell


def cell_text(cell: Cell) -> str:
    """Format a cell of the matrix.

    `46 hold`, `3 violated of 46`, `45 hold, 1 known`, `– not exercised`, `all 9 unsupported`,
    `9 could not fail`, `not judged` if all cases crashed or hung.
    """
    status: Status = cell.status
    if not cell.counts:
        return "–"
    if cell.only_broken:
        return "not judged"
    if status in FAILING:
        parts = [f"{cell.counts[s]} {s}" for s in (*FAILING, "known") if cell.counts[s]]
        return f"{', '.join(parts)} of {cell.checked + cell.broken}"
    if status == "known":
        return f"{_holding(cell)}, {cell.counts['known']} known"
    if status == "holds":
        return _holding(cell)
    if status == "unsupported" and not cell.counts["not exercised"]:
        return f"all {cell.counts['unsupported']} unsupported"
    return "– not exercised"


def _holding(cell: Cell) -> str:
    if not cell.informative:
        return f"{cell.counts['holds']} could not fail"
    text = f"{cell.counts['holds']} hold{'s' if cell.counts['holds'] == 1 else ''}"
    return f"{text} ({cell.estimated} estimated)" if cell.estimated else text
