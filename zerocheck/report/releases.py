"""Page of several runs, each with another release: verdicts, and which fault is in which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..catalogue import LIBRARIES
from ..protocol.verdicts import Obligation
from ..run.known_issues.entries import KnownIssue, ours
from ..run.known_issues.releases import Releases, library_of
from ..run.records.records import Finding, KnownReference, Record
from ..run.records.tally import FAILING, Tally, tally
from .known_faults import SEVERITIES, severity_of
from .markdown import escape, table

FILE = "releases.md"

PRESENT, PARTLY, ABSENT, UNTRIED = "yes", "partly", "no", "–"
"""Cells of the table of faults."""

EXPLAINED = (
    f"{PRESENT}: a case shows it; {ABSENT}: its own cases were run, and none shows it any more; "
    f"{PARTLY}: it shows in some implementations or forms, and is gone in others; {UNTRIED}: no "
    "case that would show it could be run."
)


@dataclass
class Release:
    """Run with one release."""

    name: str
    tally: Tally

    @classmethod
    def of(cls, records: Sequence[Record]) -> Release:
        """Read a run from its records, which begin with RunStarted."""
        counted = tally(records)
        made = cls("", counted)
        if counted.started is not None:
            releases = Releases.of(counted.started.environment)
            libraries = {library_of(name) for name in counted.started.implementations}
            names = [library for library in LIBRARIES if library in libraries]
            made.name = ", ".join(f"{library} {releases.plain(library)}" for library in names)
        return made


@dataclass
class FaultRow:
    """Fault of a library: all entries of one page, or of one reason.

    shown: implementations that show it, by release; gone: those of which an entry is stale.
    """

    known: KnownReference
    severity: int
    shown: dict[str, set[str]] = field(default_factory=dict)
    gone: dict[str, set[str]] = field(default_factory=dict)

    def cell(self, release: str) -> str:
        """Return whether a release has the fault."""
        if self.shown.get(release):
            return PARTLY if self.gone.get(release) else PRESENT
        return ABSENT if self.gone.get(release) else UNTRIED

    @property
    def implementations(self) -> list[str]:
        """Implementations that show the fault in any release."""
        return sorted({name for names in self.shown.values() for name in names})


def page(runs: Sequence[Sequence[Record]]) -> str:
    """Return the page of runs, in Markdown. Runs of one release are told apart by a number."""
    releases = [Release.of(records) for records in runs]
    for number, one in enumerate(releases):
        if any(one.name == other.name for other in releases[:number]):
            one.name += f" ({number + 1})"
    faults = faults_of(releases)
    parts = [
        "# Releases",
        "Made of the journals of runs, by `zerocheck report --matrix`.",
        *_sentences(releases),
        "## Implementations",
        _implementations(releases),
    ]
    parts += ["## Faults of the libraries", EXPLAINED]
    for number, severity in enumerate(SEVERITIES):
        of = [fault for fault in faults if fault.severity == number]
        if of:
            parts += [f"### {severity.capitalize()}", _table(of, releases)]
    parts += _changes(faults, releases)
    parts += _others(releases)
    return "\n\n".join(parts) + "\n"


def _sentences(releases: Sequence[Release]) -> Iterable[str]:
    lines = []
    for one in releases:
        started = one.tally.started
        if started is None:
            continue
        where = started.environment
        ended = "" if one.tally.complete else "; **the run did not finish**"
        libraries = ", ".join(filter(None, (f"torch {where.torch}", where.libraries)))
        lines.append(
            f"- {escape(one.name)}: {escape(libraries)}; {one.tally.cases:,} cases of the profile "
            f"{escape(started.profile)}, seed {started.seed}, on {escape(where.device)}{ended}"
        )
    yield "\n".join(lines)


def _implementations(releases: Sequence[Release]) -> str:
    rows = []
    for name in _names(releases):
        cells = []
        for one in releases:
            found = one.tally.implementations.get(name)
            if found is None:
                cells.append(UNTRIED)
                continue
            failing = sum(found.cases[status] for status in FAILING)
            texts = [f"{found.cases['holds']} hold"]
            texts += [f"{found.cases['known']} known"] if found.cases["known"] else []
            texts += [f"**{failing} fail**"] if failing else []
            texts += [f"{found.cases['unsupported']} refused"] if found.cases["unsupported"] else []
            cells.append(", ".join(texts))
        rows.append([escape(name), *cells])
    return table(["implementation", *(escape(one.name) for one in releases)], rows)


def faults_of(releases: Sequence[Release]) -> list[FaultRow]:
    """Return the faults that any run showed or missed, the most severe ones first."""
    rows: dict[str, FaultRow] = {}

    def row(known: KnownReference, obligation: Obligation | None) -> FaultRow:
        key = known.fault
        severity = severity_of(known, obligation)
        found = rows.setdefault(key, FaultRow(known, severity))
        found.severity = min(found.severity, severity)
        return found

    for one in releases:
        for finding in one.tally.known:
            if finding.known is not None:
                of = row(finding.known, finding.obligation)
                of.shown.setdefault(one.name, set()).add(finding.implementation)
        for stale in one.tally.stale:
            of = row(stale.known, stale.obligation)
            of.gone.setdefault(one.name, set()).add(stale.implementation)
    return sorted(rows.values(), key=lambda fault: (fault.severity, fault.known.reason))


def _table(faults: Sequence[FaultRow], releases: Sequence[Release]) -> str:
    by_fault = _entries()
    rows = []
    for fault in faults:
        of = by_fault.get(fault.known.fault, [])
        links = dict.fromkeys(link for issue in of for link in (issue.link, issue.fixed) if link)
        text = escape(fault.known.reason)
        upstream = ", ".join(f"[{escape(_short(link))}]({link})" for link in links)
        names = escape(", ".join(fault.implementations))
        rows.append([text, names, *(fault.cell(one.name) for one in releases), upstream])
    return table(["fault", "in", *(escape(one.name) for one in releases), "upstream"], rows)


def _changes(faults: Sequence[FaultRow], releases: Sequence[Release]) -> list[str]:
    """Return what is in one release and not in the one before, of the same library."""
    lines = []
    for fault in faults:
        known = [
            (one.name, fault.cell(one.name)) for one in releases if fault.cell(one.name) != UNTRIED
        ]
        for (before, then), (after, now) in pairwise(known):
            if then != now:
                how = {(PRESENT, ABSENT): "gone", (ABSENT, PRESENT): "new"}.get((then, now))
                how = how or f"was {then}, is {now}"
                lines.append(
                    f"- {escape(after)}, after {escape(before)}: **{how}**: "
                    f"{escape(fault.known.reason)}"
                )
    return ["## What changed", "\n".join(lines)] if lines else []


def _others(releases: Sequence[Release]) -> list[str]:
    """Return findings that no entry lists, by release."""
    shown: dict[tuple[str, str], dict[str, Finding]] = {}
    for one in releases:
        for finding in one.tally.findings:
            key = (finding.fingerprint, finding.implementation)
            shown.setdefault(key, {})[one.name] = finding
    if not shown:
        return []
    rows = [
        [
            escape(fingerprint),
            *(str(of[one.name].cases) if one.name in of else UNTRIED for one in releases),
            escape(next(iter(of.values())).title),
        ]
        for (fingerprint, _), of in shown.items()
    ]
    head = ["fingerprint", *(escape(one.name) for one in releases), ""]
    return ["## Findings that no entry lists", "Cases that show each.", table(head, rows)]


def _names(releases: Sequence[Release]) -> list[str]:
    return list(dict.fromkeys(name for one in releases for name in one.tally.implementations))


def _entries() -> Mapping[str, list[KnownIssue]]:
    found: dict[str, list[KnownIssue]] = {}
    for issue in ours():
        found.setdefault(issue.record.fault, []).append(issue)
    return found


def _short(link: str) -> str:
    """Return the name of an upstream thread: "pytorch/pytorch#143580"."""
    parts = link.removeprefix("https://github.com/").split("/")
    if len(parts) == 4 and parts[2] in ("issues", "pull"):
        return f"{parts[0]}/{parts[1]}#{parts[3]}"
    if len(parts) == 4 and parts[2] == "commit":
        return f"{parts[0]}/{parts[1]}@{parts[3][:8]}"
    return link
