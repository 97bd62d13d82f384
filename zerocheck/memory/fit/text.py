"""Table and sentences of a search. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from tabulate import tabulate

from ...sizes import binary, decimal
from ..text import NOT_IN_IT
from .recommend import on_ranks, words_of
from .result import FitReport


def render_fit(report: FitReport) -> str:
    """Render the report for a terminal."""
    parts = [_head(report), _advice(report)]
    if report.rows:
        parts.insert(1, _table(report))
    parts.append(_notes(report))
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _head(report: FitReport) -> Iterator[str]:
    yield f"{report.model}: {report.elements:,} parameters, {report.blocks} blocks"
    yield (
        f"{report.batch} x {report.sequence} positions per rank and step, {report.precision} "
        f"precision, {report.optimizer}, device memory {binary(report.limit)}, up to "
        f"{on_ranks(report.most_ranks)}"
    )


def _table(report: FitReport) -> Iterator[str]:
    where = f"on {on_ranks(report.most_ranks)}" if report.given_ranks else "on the fewest ranks"
    order = "" if report.given_ranks else "fewest ranks, then "
    yield f"what fits, and its cost {where}, by {order}recomputation, then bytes on the link:"
    yield ""
    rows = [
        [
            words_of(row),
            f"{row.smallest:,}",
            binary(row.peak.total),
            decimal(row.sent),
            f"{row.calls:,}",
            f"{row.recomputed:.0%}" if row.recomputed else "-",
        ]
        for row in report.rows
    ]
    yield tabulate(
        rows,
        headers=["choice", "fits from", "peak", "sent per step", "collectives", "forward again"],
        colalign=["left", *["right"] * 5],
        disable_numparse=True,
    )


def _advice(report: FitReport) -> Iterator[str]:
    yield from report.advice
    if report.rows:
        yield ""
        taken = report.rows[report.taken]
        yield f"to see where its memory goes: {taken.command}"


def _notes(report: FitReport) -> Iterator[str]:
    yield (
        f"points (a choice on a number of ranks): {report.simulations} simulated, "
        f"{report.by_formula} excluded by the formula of their stage alone, {report.by_update} by "
        "the optimizer step of a choice with the same shards"
    )
    excluded = list(dict.fromkeys(words_of(one) for one in report.unfit if one.by_formula))
    if excluded:
        yield f"excluded by formula on all numbers of ranks: {'; '.join(excluded)}"
    yield from report.assumes
    yield f"not tried: {'; '.join(report.not_tried)}"
    yield "sent per step: by each rank, padding included; link bytes of a ring, the least possible"
    yield NOT_IN_IT
