"""Table for whoever chooses an implementation: faults by severity, memory and communication."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from ...run.records.tally import ImplementationTally, Tally
from ..footprint import formula, paper
from ..known_faults import SEVERITIES, known_faults
from .matrix import MatrixRow


@dataclass(frozen=True)
class ChoiceRow:
    """One implementation. faults: known and new ones together, of each severity; findings: new
    ones; held, sent: next to the paper; avoid: (what to avoid, fault)."""

    name: str
    anchor: str
    findings: int
    faults: tuple[int, ...]
    held: str
    sent: str
    avoid: tuple[str, ...]


def choice_rows(counted: Tally, rows: list[MatrixRow]) -> list[ChoiceRow]:
    """Return a row for each implementation. rows: those of the matrix, in the same order."""
    faults = known_faults(counted)
    found = []
    for row in rows:
        its = [fault for fault in faults if row.name in fault.cases]
        implementation = counted.implementations[row.name]
        found.append(
            ChoiceRow(
                name=row.name,
                anchor=row.anchor,
                findings=len(counted.findings_of(row.name)),
                faults=tuple(
                    sum(one.severity == number for one in its) for number in range(len(SEVERITIES))
                ),
                held=_held(implementation),
                sent=_sent(implementation),
                avoid=tuple(one.known.avoid for one in its if one.known.avoid),
            )
        )
    return found


def _held(implementation: ImplementationTally) -> str:
    """Return the median over cases of what a rank holds, over the paper's bytes of the stage.

    Of the largest number of ranks that was measured.
    """
    if not implementation.weights:
        return "–"
    ranks, one = max(implementation.weights.items())
    return f"{median(one.ratios):.2f} times {formula(one)}, N = {ranks}"


def _sent(implementation: ImplementationTally) -> str:
    several = [one for ranks, one in sorted(implementation.weights.items()) if ranks > 1]
    if not several:
        return "–"
    middle = median(one.psi for one in several)
    return f"{middle:.2f} Ψ (paper: {paper(several[-1])})"
