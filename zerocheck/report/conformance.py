"""Report conformance.md: implementation x feature x obligation, to choose an implementation by."""

from __future__ import annotations

from collections.abc import Iterable

from ..case.features import FEATURES
from ..protocol.verdicts import TITLES
from ..run.records.records import Finding
from ..run.records.tally import FAILING, Cell, ImplementationTally, Tally
from .coverage import refused_rows
from .markdown import escape, table
from .text import cell_text

EXPLAINED = (
    "Each number counts cases with the feature, in which the obligation could have failed and was "
    "judged. It holds in all of them; what is known or wrong is next to the number. A case has "
    "several features, so a case that fails counts for each of them; the findings say which of "
    "them it needs. A dash: no case. What an implementation ignores has no row."
)


def render(counted: Tally) -> str:
    """Render the whole page as Markdown."""
    parts = [
        "# Conformance",
        *_sentences(counted),
        "## Obligations",
        _summary(counted),
        "\n".join(f"- {one}: {escape(TITLES[one])}" for one in counted.obligations),
        *_issues("Known faults", counted.known),
        *_issues("Not reproduced", counted.unreproduced),
        *_issues("Findings", counted.findings),
        "## By feature",
        EXPLAINED,
    ]
    for name, implementation in counted.implementations.items():
        parts += [f"### {escape(name)}", *_implementation(counted, implementation)]
    return "\n\n".join(parts) + "\n"


def _sentences(counted: Tally) -> Iterable[str]:
    if not counted.complete:
        yield f"**The run did not finish: {counted.cases} of {counted.planned} cases were run.**"
    if counted.started is None:
        return
    where = counted.started.environment
    libraries = [f"torch {where.torch}", *filter(None, where.libraries.split(", "))]
    yield (
        f"{escape(', '.join(libraries))}; {counted.cases:,} cases of the profile "
        f"{escape(counted.started.profile)}, seed {counted.started.seed}, on {escape(where.device)}"
        f"{f' ({escape(where.gpu)})' if where.gpu else ''}; zerocheck {escape(where.zerocheck)}, "
        f"Python {escape(where.python)}."
    )


def _summary(counted: Tally) -> str:
    rows = [
        [escape(name), *(cell_text(cell) for cell in implementation.cells.values())]
        for name, implementation in counted.implementations.items()
    ]
    return table(["implementation", *counted.obligations], rows)


def _issues(title: str, findings: Iterable[Finding]) -> Iterable[str]:
    """Return one line for each known issue, whatever number of implementations has it."""
    cases: dict[tuple[str, str], dict[str, int]] = {}
    for finding in findings:
        known = finding.known
        reason = known.reason if known is not None else finding.title
        where = known.page if known is not None and known.page else finding.fingerprint
        of = cases.setdefault((reason, where), {})
        of[finding.implementation] = of.get(finding.implementation, 0) + finding.cases
    if cases:
        yield f"## {title}"
        yield "\n".join(
            f"- {escape(reason)} {', '.join(f'{escape(n)} {c}' for n, c in of.items())} "
            f"({escape(where)})"
            for (reason, where), of in cases.items()
        )


def _implementation(counted: Tally, implementation: ImplementationTally) -> Iterable[str]:
    asked = [o for o, cell in implementation.cells.items() if cell.checked or cell.broken]
    if not asked:
        yield "Nothing was checked."
        return
    rows = []
    for name, feature in FEATURES.items():
        cells = [_cell(implementation.cells[obligation], name) for obligation in asked]
        if any(cell != "–" for cell in cells):
            rows.append([name, escape(feature.title), *cells])
    yield table(["feature", "", *asked], rows)
    refused = [row[2:] for row in refused_rows(counted) if row[0] == implementation.name and row[2]]
    if refused:
        yield "Refused, with the reason:"
        yield "\n".join(f"- {escape(names)}: {escape(reason)}" for names, reason in refused)


def _cell(cell: Cell, feature: str) -> str:
    holds = cell.features[feature, "holds"]
    others = [
        f"{cell.features[feature, status]} {status}"
        for status in (*FAILING, "known")
        if cell.features[feature, status]
    ]
    if not others:
        return str(holds) if holds else "–"
    bold = any(cell.features[feature, status] for status in FAILING)
    text = ", ".join(others)
    return f"{holds}, **{text}**" if bold else f"{holds}, {text}"
