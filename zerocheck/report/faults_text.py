"""Text of a row of the kill matrix, on the console and in Markdown."""

from __future__ import annotations

from ..run.records.finding_text import number
from ..run.records.matrix_records import FaultShrunk, FaultTried
from ..run.records.matrix_summary import Summary


def caught_text(row: FaultTried) -> str:
    """Format what caught a fault: `"gradient"`, `"hung"`, `"ESCAPED"`.

    `"unsupported"` if no case could be run.
    """
    return row.caught_by or ("unsupported" if row.cases == row.unsupported else "ESCAPED")


def cases_text(row: FaultTried) -> str:
    """Format the number of cases: `"3"`, `"3 (1 unsupported)"`."""
    others = [
        f"{count} {what}"
        for count, what in ((row.unsupported, "unsupported"), (row.parents, "failed by the parent"))
        if count
    ]
    return f"{row.cases} ({', '.join(others)})" if others else str(row.cases)


def cause_text(row: FaultTried) -> str:
    """Return the named causes, and the true one if it is not among them."""
    text = ", ".join(row.causes) or "–"
    return f"{text} (it is: {', '.join(row.true_causes)})" if row.named is False else text


def summary_lines(summary: Summary) -> list[str]:
    """Summarize the matrix, one sentence for each figure."""
    lines = [f"caught: {summary.caught} faults"]
    if summary.median_cases is not None and summary.median_seconds is not None:
        lines.append(
            f"it takes {number(summary.median_cases)} cases and "
            f"{number(summary.median_seconds, digits=2)} s in the median"
        )
    if summary.diagnosis is not None:
        middle, most = (number(one, digits=2) for one in summary.diagnosis)
        lines.append(
            f"the diagnosis of a failing case takes {middle} s in the median, at most {most}"
        )
    lines += [
        f"flagged first by the obligation that the catalogue says: {summary.as_expected}",
        f"true cause named by some finding: {summary.named_by_any} that have a name, by the first: "
        f"{summary.named}, alone: {summary.named_alone}",
        f"true cause said by attribution, without names: {summary.attributed}, and in every "
        f"failing case: {summary.attributed_always}; by either: {summary.explained} of "
        "gradient, update, publish, roundtrip and export",
    ]
    if summary.shrunk:
        sizes = ", ".join(f"{name} in {share}" for name, share in summary.small.items())
        lines.append(f"the smallest case that shows a fault has {sizes}")
    return lines


def smallest_text(shrunk: FaultShrunk | None) -> str:
    """Return the size of the smallest case that shows a fault."""
    if shrunk is None:
        return "–"
    return shrunk.size or "not found"
