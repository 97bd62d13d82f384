"""Comment on a pull request: the verdict, and what is new since the base, in at most 30 lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..run.records.finding_text import replay_line
from ..run.records.records import Finding
from ..run.records.tally import Tally, why
from .comparison import Changes, ComparedRow
from .known_faults import faults_sentence
from .markdown import escape

FILE = "comment.md"
MOST_LINES = 30
_SHOWN = 5
"""Findings that are named, and rows of each kind of change."""
_LONGEST = 240
"""Characters of a title."""


def render(counted: Tally, changes: Changes | None = None) -> str:
    """Return the comment, in Markdown. changes: since a run of the base, if there was one."""
    lines = [f"### zerocheck: {_verdict(counted, changes)}", ""]
    lines += _findings(counted, changes)
    if changes is not None:
        lines += _changes(changes)
    elif not counted.findings:
        lines += [f"- {escape(reason)}" for reason in why(counted)[:_SHOWN]]
    text = [*lines, *([""] if lines[-1] else []), _run(counted)]
    assert len(text) <= MOST_LINES
    return "\n".join(text) + "\n"


def _verdict(counted: Tally, changes: Changes | None) -> str:
    if not counted.complete:
        return f"not finished, {counted.cases} of {counted.planned} cases"
    count = len(counted.findings)
    if count:
        words = f"{count} finding{'s' if count > 1 else ''}"
        if changes is not None:
            new = len(_new(counted, changes))
            words += f", {new} of them new" if new else ", none of them new"
        return words
    if why(counted):
        return "the run fails"
    faults = faults_sentence(counted)
    return f"no new finding. {faults}" if faults else "all obligations hold"


def _new(counted: Tally, changes: Changes) -> list[Finding]:
    now = {row.now for row in changes.newly_violated}
    return [one for one in counted.findings if one.fingerprint in now]


def _findings(counted: Tally, changes: Changes | None) -> Iterator[str]:
    """Yield a line for each finding, and one to replay it. Of a comparison the new ones."""
    found = counted.findings if changes is None else _new(counted, changes)
    for one in found[:_SHOWN]:
        obligation = f", {one.obligation}" if one.obligation else ""
        yield (
            f"- **{one.status}** {escape(one.implementation)}{obligation}: "
            f"{escape(_short(one.title))}"
        )
        if command := replay_line(one):
            yield f"  {escape(command)}" if "`" in command else f"  `{command}`"
    yield from _rest(len(found))


def _changes(changes: Changes) -> Iterator[str]:
    for title, rows in (
        ("fixed", changes.fixed),
        ("no longer checked", changes.no_longer_checked),
        ("new known fault", changes.newly_known),
    ):
        for row in rows[:2]:
            yield f"- {title}: {escape(_short(_words(row)))}"
        yield from _rest(len(rows), shown=2)


def _words(row: ComparedRow) -> str:
    return ", ".join(str(one) for one in (row.of, row.what, row.now or row.before) if one)


def _rest(count: int, *, shown: int = _SHOWN) -> Iterable[str]:
    return [f"- and {count - shown} more"] if count > shown else []


def _run(counted: Tally) -> str:
    started = counted.started
    if started is None:
        return "No run."
    names = ", ".join(started.implementations[:_SHOWN])
    more = " …" if len(started.implementations) > _SHOWN else ""
    return (
        f"{escape(names)}{more}: {counted.outcomes}; profile {escape(started.profile)}, "
        f"seed {started.seed}, torch {escape(started.environment.torch)}. report.html in the "
        "artifact has the rest."
    )


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
