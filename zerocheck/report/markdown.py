"""Report report.md: the form for people, on a page that renders Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from ..foreign_text import one_line, printable
from ..run.records.finding_text import finding_lines, finding_title, number
from ..run.records.loads import Loads
from ..run.records.records import Finding
from ..run.records.tally import Tally, why
from .coverage import feature_rows, not_exercised, pairs_cell, refused_rows, vacuous_rows
from .footprint import EXPLAINED, HEADERS
from .footprint import TITLE as WEIGHED
from .footprint import rows as weighed_rows
from .known_issues import all_hold, left_out_lines, stale_lines, unverified_lines
from .loads import TITLE, headers, rows, tried_lines
from .sections import LEAKED, NOT_REPRODUCED, environment_rows, leak_lines, observability_lines
from .text import cell_text

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&!])")

_MENTION = re.compile(r"(@|\\#)(?=\w)")


def escape(text: str) -> str:
    """Return `text` as one line in which nothing is read as Markdown or HTML.

    Nor as a mention of a user or an issue, which would be notified.
    """
    plain = _SPECIAL.sub(r"\\\1", one_line(text)).replace(r"\<", "&lt;").replace(r"\>", "&gt;")
    return _MENTION.sub(r"\1&#8203;", plain)


def render(counted: Tally) -> str:
    """Render the whole report as Markdown."""
    parts = [
        "# zerocheck report",
        *_summary(counted),
        "## Obligations",
        _matrix(counted),
        *_resumed(counted),
        *_footprints(counted),
        *_findings(counted),
        *_unreproduced(counted),
        *_known(counted),
        "## Coverage",
        *_coverage(counted),
        "## Share of the bound",
        "The largest error seen, as a part of its bound. Bounds are derived from the worst that "
        "correct roundings can do, and among thousands of elements some come close to it: a share "
        "near 1 is normal, one above 1 is a violation.",
        _shares(counted),
        *_semantics(counted),
        *_environment(counted),
    ]
    return "\n\n".join(parts) + "\n"


def _summary(counted: Tally) -> Iterable[str]:
    failing = why(counted)
    if not counted.complete:
        yield (
            f"**This run did not finish: {counted.cases} of {counted.planned} cases were run.** "
            "What follows is of those."
        )
    if counted.finished is not None and counted.finished.outcome == "lost":
        yield f"Ranks were lost: {escape(counted.finished.why[-1])}"
    if failing:
        yield "\n".join(f"- {escape(reason)}" for reason in failing)
    else:
        verdict = all_hold(counted)
        yield escape(f"{verdict[0].upper()}{verdict[1:]}.")
    if lines := counted.unsupported_lines:
        yield "\n".join(f"- {escape(line)}" for line in lines)
    if missing := not_exercised(counted):
        yield f"{escape(missing[0].upper() + missing[1:])}."


def _matrix(counted: Tally) -> str:
    rows = [
        [escape(name), *(cell_text(cell) for cell in implementation.cells.values())]
        for name, implementation in counted.implementations.items()
    ]
    return table(["implementation", *counted.obligations], rows)


def _resumed(counted: Tally) -> Iterable[str]:
    some = {escape(name): i.loads for name, i in counted.implementations.items()}
    some = {name: loads for name, loads in some.items() if loads.pairs or loads.tried}
    if not some:
        return
    yield "## Loads"
    yield (
        f"{TITLE}. A number alone is of loads that hold. What was killed or damaged before is "
        "counted below each table."
    )
    yield from _loads(counted.loads)
    if len(some) > 1:
        for name, loads in some.items():
            yield f"### {name}"
            yield from _loads(loads)


def _footprints(counted: Tally) -> Iterable[str]:
    rows = [list(map(escape, row)) for row in weighed_rows(counted.implementations)]
    if rows:
        yield "## Memory and communication"
        yield f"{WEIGHED}. {EXPLAINED}"
        yield table(HEADERS, rows)


def _loads(loads: Loads) -> Iterable[str]:
    if loads.pairs:
        yield table(headers(loads), rows(loads, between=" + "))
    if loads.tried:
        yield "\n".join(f"- {line}" for line in tried_lines(loads))


def _findings(counted: Tally) -> Iterable[str]:
    if not counted.findings:
        return
    yield "## Findings"
    for finding in counted.findings:
        yield from _finding(finding)


def _finding(finding: Finding) -> Iterable[str]:
    yield f"### {escape(finding_title(finding))}"
    yield fenced("\n".join(finding_lines(finding)[1:]))
    if finding.detail:
        yield "Stacks and output of the ranks:"
        yield fenced(finding.detail)


def _unreproduced(counted: Tally) -> Iterable[str]:
    leaks = list(leak_lines(counted))
    if counted.unreproduced or leaks:
        yield "## State that cases leave behind"
        yield f"{LEAKED} {NOT_REPRODUCED}"
    for finding in counted.unreproduced:
        yield from _finding(finding)
    if leaks:
        yield "\n".join(f"- {escape(line)}" for line in leaks)


def _known(counted: Tally) -> Iterable[str]:
    left_out = [*left_out_lines(counted), *unverified_lines(counted)]
    if not (counted.known or counted.stale or left_out):
        return
    yield "## Known issues"
    yield "Listed ones, which do not fail the run. One that is stale does."
    for stale in counted.stale:
        title, *rest = stale_lines(stale)
        yield f"### {escape(title)}"
        yield fenced("\n".join(rest))
    for finding in counted.known:
        yield from _finding(finding)
    if left_out:
        yield "\n".join(f"- {escape(line)}" for line in left_out)


def fenced(text: str) -> str:
    """Return `text` in a code block that it cannot end."""
    text = printable(text)
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _coverage(counted: Tally) -> Iterable[str]:
    if not counted.implementations:
        return
    names = list(counted.implementations)
    sizes = sorted({size for i in counted.implementations.values() for size in i.world_sizes})
    rows = [
        [f"{size} rank{'s' if size > 1 else ''}"]
        + [str(counted.implementations[name].world_sizes[size] or "–") for name in names]
        for size in sizes
    ]
    yield "Cases judged, by number of ranks:"
    yield table(["world size", *map(escape, names)], rows)
    if any(i.covered.counted for i in counted.implementations.values()):
        yield (
            "Every pair of features that an implementation supports is to stand in one case at "
            "least, and in one of several ranks where it is not of the world size itself."
        )
        pairs = [
            [
                escape(name),
                pairs_cell(i.covered),
                f"{i.covered.refused_count:,}",
                str(len(i.covered.ignored)),
            ]
            for name, i in counted.implementations.items()
        ]
        yield table(["implementation", "pairs covered", "pairs refused", "features ignored"], pairs)
    rows = feature_rows(counted)
    yield (
        f"Cases judged, by feature ({len(rows)} features), or why there is none; `ignored` are "
        "options that the implementation does not have:"
    )
    yield table(
        ["feature", "", *map(escape, names)], [[row[0], *map(escape, row[1:])] for row in rows]
    )
    refusals = [list(map(escape, row)) for row in refused_rows(counted)]
    if refusals:
        yield "Refused pairs, and the features all of whose pairs are refused:"
        yield table(["implementation", "pairs", "features", "reason"], refusals)
    vacuous = [list(map(escape, row)) for row in vacuous_rows(counted)]
    if vacuous:
        yield "Vacuous: the obligation holds, but code that does nothing would hold too."
        yield table(["implementation", "obligation", "cases", "since"], vacuous)
    refused = [
        [escape(name), str(count), escape(reason)]
        for name, implementation in counted.implementations.items()
        for reason, count in (implementation.unsupported + implementation.unjudged).most_common()
    ]
    if refused:
        yield "Unsupported cases, and cases in which an obligation was not judged:"
        yield table(["implementation", "cases", "reason"], refused)


def _shares(counted: Tally) -> str:
    rows = [
        [escape(name)]
        + [
            number(cell.share, digits=3) if cell.checked else "–"
            for cell in implementation.cells.values()
        ]
        for name, implementation in counted.implementations.items()
    ]
    return table(["implementation", *counted.obligations], rows)


def _semantics(counted: Tally) -> Iterable[str]:
    declared = [i for i in counted.implementations.values() if i.semantics]
    if not declared:
        return
    words = list(dict.fromkeys(word for i in declared for word in i.semantics))
    rows = [
        [escape(i.name), ", ".join(i.tiers), *(escape(i.semantics.get(word, "")) for word in words)]
        for i in declared
    ]
    yield "## Declared semantics"
    yield table(["implementation", "shown", *map(escape, words)], rows)
    lines = observability_lines(counted)
    if lines:
        yield "## Observed placement"
        yield "\n".join(f"- {escape(line)}" for line in lines)


def _environment(counted: Tally) -> Iterable[str]:
    rows = environment_rows(counted)
    if rows:
        yield "## Environment"
        yield table(["", ""], [[escape(name), escape(value)] for name, value in rows])


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; cells are Markdown already."""
    return str(tabulate(rows, headers=headers, tablefmt="pipe", disable_numparse=True))
