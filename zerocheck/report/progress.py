"""Console of a run: a matrix that fills in, or plain lines, and the outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from tabulate import tabulate

from ..foreign_text import one_line
from ..protocol.verdicts import Obligation
from ..run.records.case_counts import case_count
from ..run.records.finding_text import finding_lines, finding_title
from ..run.records.loads import Loads
from ..run.records.records import CaseFinished, Finding, Record, RunFinished, RunStarted, StaleIssue
from ..run.records.tally import FAILING, Cell, ImplementationTally, Tally, unchecked, why
from .console import new_console
from .coverage import coverage_lines, not_exercised
from .footprint import TITLE as WEIGHED
from .footprint import lines as weighed_lines
from .known_issues import all_hold, fault_lines, left_out_lines, stale_lines, unverified_lines
from .loads import TITLE, headers, rows, tried_lines
from .next_steps import next_lines
from .sections import leak_lines, observability_lines
from .text import cell_text

Detail = Literal["quiet", "normal", "verbose"]
"""quiet: findings and the verdict; normal: progress, the matrix, and a line for each known fault;
verbose: known issues in full too."""

PLAIN_SECONDS = 10.0
"""Time between two lines where the output is not a terminal."""

SILENT_SECONDS = 30.0
"""Time without a finished case after which that is said, and said again after twice as long."""


class ProgressDisplay:
    """Display of a run's records as they come. Every value is printed as text, never as markup.

    detail: how much is shown; see `Detail`.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        plain_seconds: float = PLAIN_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        detail: Detail = "normal",
    ):
        self._console = console or new_console()
        self._plain_seconds, self._silent_seconds = plain_seconds, silent_seconds
        self._detail = detail
        self._tally = Tally()
        self._live: Live | None = None
        self._wait: threading.Timer | None = None
        self._titles: dict[int, str] = {}
        self._began = self._last_line = time.monotonic()

    def handle(self, record: Record) -> None:
        """Show one record."""
        self._tally.add(record)
        match record:
            case RunStarted():
                self._start()
            case CaseFinished():
                self._case_finished()
            case Finding():
                self._found(record)
            case StaleIssue():
                if self._detail != "quiet":
                    self._say(stale_lines(record)[0])
            case RunFinished():
                self.close()
                if self._titles or self._tally.stale:
                    self._console.print()
                print_findings(self._console, self._tally, detail=self._detail)
                print_outcome(self._console, self._tally, detail=self._detail)

    def begins(self, activity: str) -> None:
        """Say what the run does, if that takes longer than PLAIN_SECONDS."""
        if self._detail == "quiet":
            self._end_wait()
            return
        line = f"{one_line(activity)} ..."
        self._after(self._plain_seconds, self._say, line)

    def _after(self, seconds: float, say: Callable[..., None], *given: object) -> None:
        """Say something unless something else comes before."""
        self._end_wait()
        self._wait = threading.Timer(seconds, say, given)
        self._wait.daemon = True
        self._wait.start()

    def _silent(self, seconds: float) -> None:
        """Say that no case has ended for so long, and wait for twice as long."""
        if threading.current_thread() is not self._wait:
            return  # something came in the meantime
        self._say(
            f"{self._status()}; none has ended for {duration(seconds)}: a case that makes no "
            "progress is ended, and reported"
        )
        self._after(seconds, self._silent, 2 * seconds)

    def _end_wait(self) -> None:
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None

    def close(self) -> None:
        """Give the terminal back. A second call does nothing."""
        self._end_wait()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _start(self) -> None:
        started = self._tally.started
        self._end_wait()
        self._began = self._last_line = time.monotonic()
        if self._detail == "quiet":
            return
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, get_renderable=self._picture, transient=True)
            self._live.start()
        else:
            sizes = ", ".join(map(str, started.world_sizes)) if started else ""
            names = ", ".join(map(one_line, self._tally.implementations))
            model = f" with {one_line(started.model)}" if started and started.model else ""
            shard = f"shard {one_line(started.shard)}: " if started and started.shard else ""
            planned = case_count(self._tally.planned)
            self._say(f"{shard}{planned} planned for {names}{model} on {sizes} ranks")
        for line in _reuse_lines(started) if started else ():
            self._say(line)
        for obligation, reason in (started.without if started else {}).items():
            self._say(f"{obligation} is not checked: {one_line(reason)}")
        for name, obligation, reason in unchecked(self._tally):
            self._say(f"{one_line(name)}: {obligation} is not checked: {one_line(reason)}")
        self._after(self._silent_seconds, self._silent, self._silent_seconds)

    def _case_finished(self) -> None:
        now = time.monotonic()
        late = now - self._last_line >= self._plain_seconds
        if self._detail == "quiet":
            return
        if self._live is None and late:
            self._last_line = now
            self._say(self._status())
        self._after(self._silent_seconds, self._silent, self._silent_seconds)

    def _found(self, finding: Finding) -> None:
        """Print one line for a new finding, and again when more is known of it.

        All of it follows at the end.
        """
        hidden = finding.known is not None and self._detail != "verbose"
        if finding.merged is not None or hidden or self._detail == "quiet":
            return
        title = finding_title(finding)
        before = self._titles.get(finding.number)
        self._titles[finding.number] = title
        if before is None:
            self._console.print(Text(title, style=_style(finding)))
        elif before != title:
            cases = "1 failing case" if finding.cases == 1 else f"{finding.cases} failing cases"
            line = f"updated ({cases}): {title}"
            self._console.print(Text(line, style=_style(finding)))

    def _say(self, line: str) -> None:
        self._console.print(Text(line))

    def _picture(self) -> Group:
        return Group(matrix(self._tally, self._console.width), Text(self._status(), style="dim"))

    def _status(self) -> str:
        return status_line(self._tally, time.monotonic() - self._began)


def status_line(counted: Tally, seconds: float) -> str:
    """Format the state: `"120 of 1200 cases, 3.4 per second, about 5 min left, 2 findings"`."""
    done, planned = counted.cases, counted.planned
    parts = [f"{done} of {planned} cases"]
    rate = done / max(seconds, 1e-9)
    if done:
        parts += [f"{rate:.1f} per second", f"{duration((planned - done) / rate)} left"]
    found, known = len(counted.findings), len(counted.known)
    if found:
        parts.append(f"{found} finding{'s' if found != 1 else ''}")
    if known:
        parts.append(f"{known} known")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Format a duration: `"40 s"`, `"about 5 min"`, `"about 2 h"`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"about {seconds / 60:.0f} min"
    return f"about {seconds / 3600:.0f} h"


def matrix(counted: Tally, width: int) -> Group:
    """Draw the matrix: obligations down, implementations across.

    Of several tables, where the terminal is too narrow for one: no word is broken. width: columns.
    """
    first = max((len(one) for one in (*counted.obligations, "obligation")), default=0)
    tables: list[list[ImplementationTally]] = []
    left = 0
    for implementation in counted.implementations.values():
        needed = _widest(implementation) + _GAP
        if not tables or needed > left:
            tables.append([])
            left = width - first
        tables[-1].append(implementation)
        left -= needed
    return Group(*(_table(counted.obligations, some) for some in tables))


_GAP = 3
"""Columns between two cells of a table."""


def _widest(implementation: ImplementationTally) -> int:
    texts = map(cell_text, implementation.cells.values())
    return max(map(len, (one_line(implementation.name), *texts)))


def _table(obligations: Iterable[Obligation], some: Sequence[ImplementationTally]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("obligation", no_wrap=True)
    for implementation in some:
        table.add_column(Text(one_line(implementation.name)), overflow="fold")
    for obligation in obligations:
        table.add_row(Text(obligation), *(_cell(one.cells[obligation]) for one in some))
    return table


def _cell(cell: Cell) -> Text:
    if not cell.counts:
        return Text("")
    if cell.status in FAILING:
        return Text(cell_text(cell), style="bold red")
    style = {"holds": "green", "known": "yellow"}.get(cell.status, "dim")
    return Text(cell_text(cell), style=style)


def print_findings(console: Console, counted: Tally, *, detail: Detail = "normal") -> None:
    """Print unreproduced failures, findings, and stale issues; verbose: known issues before them.

    Those that fail the run are last.
    """
    known = counted.known if detail == "verbose" else []
    for finding in (*known, *counted.unreproduced, *counted.findings):
        print_finding(console, finding)
    for stale in counted.stale:
        _print(console, stale_lines(stale), "bold red")


def _reuse_lines(started: RunStarted) -> list[str]:
    """Return what is taken from other runs, and which shards are missing."""
    lines = [
        f"no journal of shard {one_line(shard)}: its cases are run here"
        for shard in started.missing_shards
    ]
    if started.reused:
        lines.append(f"{started.reused} of {started.planned} cases were judged by other runs")
    return lines


def print_finding(console: Console, finding: Finding) -> None:
    """Print one finding, its title in red; a known one in yellow."""
    _print(console, finding_lines(finding), _style(finding))


def _style(finding: Finding) -> str:
    return "bold red" if finding.known is None and not finding.suspicion else "yellow"


def _print(console: Console, lines: list[str], style: str) -> None:
    title, *rest = lines
    console.print(Text(title, style=style))
    for line in rest:
        console.print(Text(line))
    console.print()


def print_outcome(console: Console, counted: Tally, *, detail: Detail = "normal") -> None:
    """Print the final matrix and all figures, why the run fails or that it does not, and what next.

    quiet: nothing but why the run fails, or that it does not.
    """
    if detail != "quiet":
        _print_figures(console, counted, detail)
    reasons = reasons_of(counted)
    if reasons and counted.complete and len(counted.implementations) > 1:
        console.print(Text(counted.outcomes))
    for reason in reasons:
        console.print(Text(one_line(reason), style="red"))
    if not counted.complete:
        line = f"{ended(counted)} after {counted.cases} of {counted.planned} cases"
        console.print(Text(line, style="yellow"))
    elif not reasons:
        console.print(Text(all_hold(counted), style="bold green"))
    for line in counted.unsupported_lines:
        console.print(Text(one_line(line)))
    if any_judged(counted) and (missing := not_exercised(counted)):
        console.print(Text(missing))
    for line in fault_lines(counted) if detail == "normal" else ():
        console.print(Text(line, style="yellow"))
    for line in () if detail == "quiet" else next_lines(counted):
        console.print(Text(line))


def _print_figures(console: Console, counted: Tally, detail: Detail) -> None:
    """Print the matrix, loads, memory and communication, leaks and coverage."""
    if not any_judged(counted):
        return
    if console.is_terminal:
        console.print(matrix(counted, console.width))
    else:
        rows = [
            [
                obligation,
                *(cell_text(i.cells[obligation]) for i in counted.implementations.values()),
            ]
            for obligation in counted.obligations
        ]
        headers = ["obligation", *map(one_line, counted.implementations)]
        console.print(Text(str(tabulate(rows, headers, "simple", disable_numparse=True))))
    console.print()
    _print_loads(console, counted.loads)
    _print_weights(console, counted)
    for line in observability_lines(counted):
        console.print(Text(line))
    for line in (*leak_lines(counted), *left_out_lines(counted), *unverified_lines(counted)):
        console.print(Text(line, style="yellow"))
    for line in coverage_lines(counted):
        console.print(Text(line))


def reasons_of(counted: Tally) -> list[str]:
    """Return why the run fails, one sentence each; none if all obligations hold."""
    finished = counted.finished.why if counted.finished is not None else ()
    return [*dict.fromkeys((*why(counted), *finished))]


def any_judged(counted: Tally) -> bool:
    """Return False if all cases crashed or hung, so that nothing can be said of an obligation."""
    implementations = counted.implementations.values()
    cells = [cell for tallied in implementations for cell in tallied.cells.values()]
    return not cells or not all(cell.only_broken for cell in cells)


def ended(counted: Tally) -> str:
    """Return why a run did not finish."""
    lost = counted.finished is not None and counted.finished.outcome == "lost"
    return "ranks were lost" if lost else "interrupted"


def _print_loads(console: Console, loads: Loads) -> None:
    """Print the loads by world sizes, and those of damaged checkpoints."""
    if not (loads.pairs or loads.tried):
        return
    if loads.pairs:
        given = rows(loads, between="\n")
        console.print(Text(TITLE))
        console.print(Text(str(tabulate(given, headers(loads), "simple", disable_numparse=True))))
    for line in tried_lines(loads):
        console.print(Text(line))
    console.print()


def _print_weights(console: Console, counted: Tally) -> None:
    """Print the memory and communication of measured cases."""
    text = weighed_lines(counted.implementations)
    if not text:
        return
    console.print(Text(f"{WEIGHED} (small models: padding is much of it):"))
    for line in text:
        console.print(Text(f"  {one_line(line)}"))
    console.print()
