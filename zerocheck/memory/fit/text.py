"""Table and sentences of a search. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from tabulate import tabulate

from ...sizes import binary, decimal
from ..text import NOT_IN_IT, samples_words
from .recommend import on_ranks, seconds, words_of
from .result import FitReport, FitRow


def render_fit(report: FitReport) -> str:
    """Render the report for a terminal."""
    parts = [_head(report), _advice(report)]
    if report.rows:
        parts.insert(1, _table(report))
    parts.append(_notes(report))
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _head(report: FitReport) -> Iterator[str]:
    yield f"{report.model}: {report.elements:,} parameters, {report.blocks} blocks"
    samples = samples_words(report.batch, report.sequence, report.inputs)
    yield (
        f"{samples} per rank and step, {report.precision} "
        f"precision, {report.optimizer}, device memory {binary(report.limit)}, up to "
        f"{on_ranks(report.most_ranks)}"
    )


def _table(report: FitReport) -> Iterator[str]:
    where = f"on {on_ranks(report.most_ranks)}" if report.given_ranks else "on the fewest ranks"
    order = "recomputation, then bytes on the link"
    if report.speeds is not None:
        order = "step time on paper"
    if not report.given_ranks:
        order = f"fewest ranks, then {order}"
    offloaded = any(row.host for row in report.rows)
    yield f"what fits, and its cost {where}, by {order}:"
    yield ""
    rows = [
        [
            words_of(row),
            f"{row.smallest:,}",
            binary(row.peak.total),
            decimal(row.sent),
            f"{row.calls:,}",
            *((binary(row.host), decimal(row.copied)) if offloaded else ()),
            f"{row.recomputed:.0%}" if row.recomputed else "-",
            *(_paper(row) if report.speeds is not None else ()),
        ]
        for row in report.rows
    ]
    headers = ["choice", "fits from", "peak", "sent per step", "collectives"]
    headers += ["host", "copied per step"] if offloaded else []
    headers += ["forward again"]
    if report.speeds is not None:
        headers += ["step on paper", "exposed on paper"]
    yield tabulate(
        rows,
        headers=headers,
        colalign=["left", *["right"] * (len(headers) - 1)],
        disable_numparse=True,
    )


def _paper(row: FitRow) -> tuple[str, str]:
    if row.paper is None:
        return "-", "-"
    return seconds(row.paper.step), seconds(row.paper.exposed)


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
    if report.speeds is not None:
        yield (
            f"on paper: at {decimal(report.speeds.link)}/s and "
            f"{report.speeds.operations / 1e12:.4g}T operations per second, without latency and "
            "the optimizer; no measurement, and the least possible"
        )
    yield NOT_IN_IT
