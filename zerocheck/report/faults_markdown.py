"""Report faults.md: the kill matrix for people, on a page that renders Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..protocol.verdicts import TITLES
from ..run.records.finding_text import number
from ..run.records.matrix_records import FaultShrunk, FaultTried
from ..run.records.matrix_summary import Summary
from .faults_text import cases_text, caught_text, cause_text, smallest_text, summary_lines
from .markdown import escape, table


def render(summary: Summary) -> str:
    """Render the whole matrix as Markdown."""
    parts = [
        "# Kill matrix",
        *_summary(summary),
        *_failures(summary),
        "## Faults",
        "A fault is caught by the first case that fails where its parent, the same code without "
        "it, does not. Cases count in the order of the plan, unsupported ones too. Seconds are "
        "those of running and judging them, several faults side by side. The cause is what "
        "explains all failing cases, of which three or more are looked for.",
        _faults(summary.rows, summary.shrunk),
        "## Who flags what first",
        _first_by(summary),
        *_environment(summary),
    ]
    return "\n\n".join(parts) + "\n"


def _summary(summary: Summary) -> Iterable[str]:
    if not summary.complete:
        yield (
            f"**This matrix is not complete: {summary.tried} of {summary.planned} faults were "
            "tried.** What follows is of those."
        )
    started = summary.started
    if started is not None:
        into = f" into {started.implementation}" if started.implementation else ""
        most = f", at most {started.max_cases} cases each" if started.max_cases else ""
        planted = "injected" if into else "planted"
        yield escape(
            f"Known bugs, {planted} on purpose{into}, and what `zerocheck run --profile "
            f"{started.profile}` makes of them (seed {started.seed}{most})."
        ).replace("\\`", "`")
    yield "\n".join(f"- {escape(line)}" for line in summary_lines(summary))


def _failures(summary: Summary) -> Iterable[str]:
    if summary.escaped:
        yield "## Escaped"
        yield "\n".join(
            f"- **{escape(row.fault)}**: {escape(row.summary)} ({row.cases} cases)"
            for row in summary.escaped
        )
    if summary.without_effect:
        yield "## Nothing to inject into"
        yield "In no case did the code call a collective that these could change:"
        yield "\n".join(
            f"- {escape(row.fault)}: {escape(row.summary)}" for row in summary.without_effect
        )
    if summary.misnamed:
        yield "## Caught, and another cause named first"
        yield table(
            ["fault", "true cause", "named", "by further findings", "title"],
            [
                [
                    escape(row.fault),
                    escape(", ".join(row.true_causes)),
                    escape(", ".join(row.causes) or "–"),
                    escape(", ".join(row.other_causes) or "–"),
                    escape(row.title),
                ]
                for row in summary.misnamed
            ],
        )
    if summary.misattributed:
        yield "## Not said by attribution alone"
        yield table(
            ["fault", "true cause", "attribution, case by case"],
            [
                [
                    escape(row.fault),
                    escape(", ".join(row.true_causes) or "–"),
                    "<br>".join(
                        escape(one or "–")
                        for one in dict.fromkeys((*row.attributions, *filter(None, [row.parted])))
                    ),
                ]
                for row in summary.misattributed
            ],
        )


def _faults(rows: Sequence[FaultTried], shrunk: Mapping[str, FaultShrunk]) -> str:
    return table(
        [
            *("fault", "parent", "flagged first by", "cases", "s", "cause named"),
            *(("smallest case",) if shrunk else ()),
        ],
        [
            [
                escape(row.fault),
                escape(row.parent.rpartition(":")[2]),
                escape(caught_text(row)),
                escape(cases_text(row)),
                number(row.seconds, digits=2),
                escape(cause_text(row)),
                *((escape(smallest_text(shrunk.get(row.fault))),) if shrunk else ()),
            ]
            for row in rows
        ],
    )


def _first_by(summary: Summary) -> str:
    titles = {str(obligation): title for obligation, title in TITLES.items()}
    return "\n".join(
        f"- **{word}** ({titles.get(word, 'the ranks')}): "
        + (", ".join(escape(row.fault) for row in rows) or "none")
        for word, rows in summary.first_by.items()
    )


def _environment(summary: Summary) -> Iterable[str]:
    if summary.started is None:
        return
    environment = summary.started.environment
    yield "## Environment"
    rows = [
        [name, escape(str(getattr(environment, name)))] for name in environment.__struct_fields__
    ]
    if summary.finished is not None:
        rows.append(["seconds", f"{summary.finished.seconds:.0f}"])
    yield table(["", ""], rows)
