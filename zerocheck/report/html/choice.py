"""Table for whoever chooses an implementation: faults by severity, memory and communication."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from ...run.records.tally import ImplementationTally, Tally
from ..communication import paper
from ..footprint import formula, on_most_ranks
from ..known_faults import SEVERITIES, known_faults
from .matrix import MatrixRow


@dataclass(frozen=True)
class ChoiceRow:
    """One implementation.

    findings: new ones; faults: number of known ones of each severity; held, sent: next to the
    paper; avoid: (fault, what to do about it), the worst first.
    """

    name: str
    anchor: str
    findings: int
    faults: tuple[int, ...]
    held: str
    sent: str
    avoid: tuple[tuple[str, str], ...]


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
                avoid=tuple((one.known.reason, one.known.avoid) for one in its),
            )
        )
    return found


def _held(implementation: ImplementationTally) -> str:
    """Return what a rank holds over the paper's bytes of the stage, on the most ranks measured.

    Of the largest case, in which padding counts least, and the median over cases.
    """
    if not implementation.weights:
        return "–"
    ranks, one = max(implementation.weights.items())
    words = formula(one).replace("Psi", "Ψ")
    return f"{words}, N = {ranks}: {one.ratio:.2f} times, median {median(one.ratios):.2f}"


def _sent(implementation: ImplementationTally) -> str:
    """Return what a rank sends in a step, the median over cases, on the most ranks measured."""
    one = on_most_ranks(implementation)
    return "–" if one is None else f"{one.middle.psi:.2f} Ψ (paper: {paper(one)})"
