"""Summary of the records of a kill matrix. A pure function of them; its reports start here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from ...errors import ExitCode
from ...protocol.verdicts import OBLIGATIONS
from .matrix_records import FaultsFinished, FaultShrunk, FaultsStarted, FaultTried, MatrixRecord


@dataclass(frozen=True)
class Share:
    """Share of things: a count out of a possible number."""

    count: int
    of: int

    def __str__(self) -> str:
        percent = f" ({100 * self.count / self.of:.0f} %)" if self.of else ""
        return f"{self.count} of {self.of}{percent}"


class Summary:
    """All rows, in the order of the catalogue, and their totals."""

    def __init__(self, records: Iterable[MatrixRecord]) -> None:
        self.started: FaultsStarted | None = None
        self.finished: FaultsFinished | None = None
        rows: dict[str, FaultTried] = {}
        self.shrunk: dict[str, FaultShrunk] = {}
        """The smallest case of each fault for which one was looked for, by its name."""
        for record in records:
            match record:
                case FaultsStarted():
                    self.started = record
                case FaultTried():
                    rows[record.fault] = record
                case FaultShrunk():
                    self.shrunk[record.fault] = record
                case FaultsFinished():
                    self.finished = record
        names = self.started.faults if self.started is not None else ()
        self.planned = len(names)
        self._rows = [rows[name] for name in names if name in rows]

    @property
    def complete(self) -> bool:
        """True if the matrix came to its end."""
        return self.finished is not None and self.finished.outcome == "done"

    @property
    def tried(self) -> int:
        """Number of faults with a row."""
        return len(self._rows)

    @property
    def without_effect(self) -> list[FaultTried]:
        """Faults that found nothing to act on in the code that the user named."""
        if self.started is None or not self.started.implementation:
            return []
        return [row for row in self._rows if row.cases == row.unsupported]

    @property
    def rows(self) -> list[FaultTried]:
        """Faults that were tried and could act, in the order of the catalogue."""
        without = self.without_effect
        return [row for row in self._rows if row not in without]

    @property
    def escaped(self) -> list[FaultTried]:
        """Faults that no case caught."""
        return [row for row in self.rows if not row.caught]

    @property
    def exit_code(self) -> ExitCode:
        """HOLDS if every fault was caught, FAILS if one escaped or none could act.

        INTERRUPTED if not all were tried.
        """
        if not self.complete:
            return ExitCode.INTERRUPTED
        return ExitCode.FAILS if self.escaped or not self.rows else ExitCode.HOLDS

    @property
    def caught(self) -> Share:
        """Share of the tried faults that were caught."""
        return Share(len(self.rows) - len(self.escaped), len(self.rows))

    @property
    def median_cases(self) -> float | None:
        """Median number of cases over the faults caught, None without any."""
        return median(cases) if (cases := [row.cases for row in self.rows if row.caught]) else None

    @property
    def median_seconds(self) -> float | None:
        """Median time in seconds over the faults caught, None without any."""
        spent = [row.seconds for row in self.rows if row.caught]
        return median(spent) if spent else None

    @property
    def small(self) -> dict[str, Share]:
        """Share of smallest cases with at most 3 ranks, 1 block, 2 steps."""
        found = [one for one in self.shrunk.values() if one.case is not None]
        cases = [one.case for one in found if one.case is not None]
        return {
            "at most 3 ranks": Share(sum(one.ranks <= 3 for one in found), len(found)),
            "1 block": Share(sum(len(case.model.blocks) <= 1 for case in cases), len(cases)),
            "2 steps": Share(sum(case.training.steps <= 2 for case in cases), len(cases)),
        }

    @property
    def as_expected(self) -> Share:
        """Share of caught faults that the catalogue's obligation flags first.

        A crash or hang counts for those that must break.
        """
        expected = [
            row.caught_by == row.expected
            if row.expected is not None
            else row.caught_by in ("crashed", "hung")
            for row in self.rows
            if row.caught
        ]
        return Share(sum(expected), len(expected))

    @property
    def diagnosis(self) -> tuple[float, float] | None:
        """Median and largest seconds of diagnosing the first failing case; None for no case."""
        took = [row.diagnosis for row in self.rows if row.diagnosis is not None]
        return (median(took), max(took)) if took else None

    @property
    def named(self) -> Share:
        """Share of faults with a known true cause that the first finding names."""
        names = [row.named for row in self.rows if row.named is not None]
        return Share(sum(names), len(names))

    @property
    def named_by_any(self) -> Share:
        """Share of faults with a known true cause that some finding names."""
        names = [row.named_by_any for row in self.rows if row.named_by_any is not None]
        return Share(sum(names), len(names))

    @property
    def attributed(self) -> Share:
        """Share of faults of the attributed obligations of which attribution says the right thing.

        By the rubric of each fault, and wherever it says anything.
        """
        verdicts = [row.attributed for row in self.rows if row.attributed is not None]
        return Share(sum(verdicts), len(verdicts))

    @property
    def attributed_always(self) -> Share:
        """Share of those of which it is also silent in no failing case."""
        always = [row.attributed_always for row in self.rows if row.attributed is not None]
        return Share(sum(always), len(always))

    @property
    def misattributed(self) -> list[FaultTried]:
        """Faults of which attribution says nothing, or something else in a failing case."""
        return [row for row in self.rows if row.attributed is False]

    @property
    def explained(self) -> Share:
        """Share of those faults whose true cause is named, or of which attribution is right."""
        verdicts = [
            bool(row.named_by_any or row.attributed)
            for row in self.rows
            if row.attributed is not None
        ]
        return Share(sum(verdicts), len(verdicts))

    @property
    def named_alone(self) -> Share:
        """Share of faults whose true cause was named and no other."""
        names = [row.named_alone for row in self.rows if row.named is not None]
        return Share(sum(names), len(names))

    @property
    def misnamed(self) -> list[FaultTried]:
        """Faults whose true cause is not among those named."""
        return [row for row in self.rows if row.named is False]

    @property
    def first_by(self) -> dict[str, list[FaultTried]]:
        """Faults by the obligation that flags them first, or "crashed", or "hung"."""
        flagged: dict[str, list[FaultTried]] = {
            word: [row for row in self.rows if row.caught_by == word]
            for word in (*OBLIGATIONS, "crashed", "hung")
        }
        return {word: rows for word, rows in flagged.items() if rows or word in OBLIGATIONS}
