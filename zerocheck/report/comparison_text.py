"""Text of a comparison with an earlier run: on the console, in against.md and against.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.text import Text
from tabulate import tabulate

from ..foreign_text import one_line
from ..run.records.finding_text import number
from ..run.records.journal import encode
from .comparison import AGAINST_FORMAT, Changes, ComparedRow
from .markdown import escape, table


class _Section(NamedTuple):
    name: str
    title: str
    columns: tuple[str, ...]
    cells: Callable[[ComparedRow], list[str]]


def _status(row: ComparedRow) -> list[str]:
    return [row.of, row.what, str(row.before), str(row.now)]


def _bug(row: ComparedRow) -> list[str]:
    """Return the cells of a new or fixed failure.

    A finding has a fingerprint on one side; an obligation that follows has two statuses.
    """
    fingerprint = row.now or row.before
    changed = f"{row.before}, now {row.now}" if row.before and row.now else fingerprint
    return [row.of, row.what, changed]


def _moved(row: ComparedRow) -> list[str]:
    return [
        row.of,
        row.what,
        number(row.before),
        number(row.now),
        f"x {number(row.factor, digits=4)}",
    ]


_STATUS = ("implementation", "obligation", "before", "now")
_BUG = ("implementation", "what", "fingerprint")
_SECTIONS = (
    _Section("environment", "Environment", ("", "before", "now"), lambda row: _status(row)[1:]),
    _Section("newly_violated", "Newly violated", _BUG, _bug),
    _Section("no_longer_checked", "No longer checked", _STATUS, _status),
    _Section("fixed", "Fixed", _BUG, _bug),
    _Section("newly_known", "Newly seen known issues", _BUG, _bug),
    _Section(
        "unsupported",
        "Unsupported cases: newly (before 0), no longer (now 0), more or fewer",
        ("implementation", "reason", "before", "now"),
        _status,
    ),
    _Section(
        "refused_pairs",
        "Refused pairs of features",
        ("implementation", "reason", "before", "now"),
        _status,
    ),
    _Section(
        "newly_not_exercised",
        "Newly not exercised",
        ("implementation", "feature", "reason"),
        lambda row: [row.of, row.what, row.now],
    ),
    _Section(
        "newly_exercised",
        "Exercised now",
        ("implementation", "feature", "reason before"),
        lambda row: [row.of, row.what, row.before],
    ),
    _Section(
        "shares",
        "Share of the bound that moved, the largest factor first",
        (*_STATUS, "factor"),
        _moved,
    ),
    _Section(
        "memory",
        "Memory and communication that moved, the largest factor first",
        ("implementation", "figure", "before", "now", "factor"),
        _moved,
    ),
)


def _filled(changes: Changes) -> Iterator[tuple[_Section, Sequence[ComparedRow]]]:
    for section in _SECTIONS:
        rows = getattr(changes, section.name)
        if rows:
            yield section, rows


def outcome(changes: Changes) -> str:
    """Return one sentence on whether something became wrong."""
    new, lost = len(changes.newly_violated), len(changes.no_longer_checked)
    if not new and not lost:
        return "nothing is newly violated"
    parts = [f"{new} newly violated"] if new else []
    parts += [f"{lost} obligation{'s' if lost > 1 else ''} no longer checked"] if lost else []
    return ", ".join(parts)


def print_changes(console: Console, changes: Changes) -> None:
    """Print the comparison."""
    for note in changes.notes:
        console.print(Text(one_line(note)))
    console.print()
    for section, rows in _filled(changes):
        console.print(Text(section.title, style="bold"))
        cells = [list(map(one_line, section.cells(row))) for row in rows]
        console.print(Text(str(tabulate(cells, section.columns, "simple", disable_numparse=True))))
        console.print()
    style = "bold red" if changes.exit_code else "bold green"
    console.print(Text(outcome(changes), style=style))


def markdown(changes: Changes) -> str:
    """Render the comparison as Markdown."""
    headline = outcome(changes)
    parts = ["# zerocheck: against an earlier run", f"**{headline[0].upper()}{headline[1:]}.**"]
    parts.append("\n".join(f"- {escape(note)}" for note in changes.notes))
    for section, rows in _filled(changes):
        parts.append(f"## {section.title}")
        parts.append(
            table(list(section.columns), [list(map(escape, section.cells(row))) for row in rows])
        )
    return "\n\n".join(parts) + "\n"


def as_json(changes: Changes) -> str:
    """Render the comparison as JSON."""
    data: dict[str, Any] = {
        "format": AGAINST_FORMAT,
        "notes": changes.notes,
        **{
            section.name: [
                {"implementation": row.of, "what": row.what, "before": row.before, "now": row.now}
                for row in getattr(changes, section.name)
            ]
            for section in _SECTIONS
        },
        "exit_code": changes.exit_code,
    }
    return msgspec.json.format(encode(data), indent=2).decode() + "\n"
