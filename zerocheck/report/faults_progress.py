"""Console of a kill matrix: one line for each fault, and the summary."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..foreign_text import one_line
from ..run.records.matrix_records import (
    FaultsFinished,
    FaultShrunk,
    FaultsStarted,
    FaultTried,
    MatrixRecord,
)
from ..run.records.matrix_summary import Summary
from .console import new_console
from .faults_text import cases_text, caught_text, cause_text, smallest_text, summary_lines
from .progress import duration


class FaultsProgress:
    """Display of the records of a kill matrix as they come. Every value is printed as text."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or new_console()
        self._records: list[MatrixRecord] = []
        self._planned = 0
        self._live: Live | None = None
        self._began = time.monotonic()

    def handle(self, record: MatrixRecord) -> None:
        """Show one record."""
        self._records.append(record)
        match record:
            case FaultsStarted():
                self._start(record)
            case FaultTried():
                style = "" if record.caught else "bold red"
                self._console.print(Text(self._line(record), style=style))
            case FaultShrunk():
                self._console.print(
                    Text(one_line(f"{record.fault}: smallest case {smallest_text(record)}"))
                )
            case FaultsFinished():
                self.close()
                self.show(Summary(self._records))

    def close(self) -> None:
        """Give the terminal back. A second call does nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _start(self, started: FaultsStarted) -> None:
        self._planned = len(started.faults)
        self._began = time.monotonic()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, get_renderable=self._status, transient=True)
            self._live.start()
        else:
            self._console.print(Text(f"{self._planned} faults, profile {started.profile}"))

    def _line(self, row: FaultTried) -> str:
        done = sum(isinstance(record, FaultTried) for record in self._records)
        plural = "s" if row.cases != 1 else ""
        return one_line(
            f"{done}/{self._planned} {row.fault}: {caught_text(row)}, {cases_text(row)} "
            f"case{plural}, {row.seconds:.1f} s, cause {cause_text(row)}"
        )

    def _status(self) -> Text:
        done = sum(isinstance(record, FaultTried) for record in self._records)
        status = f"{done} of {self._planned} faults"
        if done:
            left = (time.monotonic() - self._began) / done * (self._planned - done)
            status += f", {duration(left)} left"
        return Text(status, style="dim")

    def show(self, summary: Summary) -> None:
        """Print the summary of the matrix."""
        self._console.print()
        for line in summary_lines(summary):
            self._console.print(Text(one_line(line)))
        for row in summary.escaped:
            self._console.print(Text(one_line(f"escaped: {row.fault}"), style="bold red"))
        if not summary.complete:
            line = f"interrupted after {summary.tried} of {summary.planned} faults"
            self._console.print(Text(line, style="yellow"))
