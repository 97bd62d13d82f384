"""Comparison of a run with an earlier one: regressions, fixes, figures. For upgrades of torch.

Both are taken in the form of report.json, so an earlier run may be a journal or that file. The
largest errors of two runs of the same cases on one machine are the same bit for bit; every
difference is listed, by the factor of its change, and no change is called small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ExitCode, UsageError
from ..protocol.verdicts import Status
from ..run.records.journal import is_matrix, read
from ..run.records.records import Environment
from ..run.records.tally import FAILING, Tally, tally
from . import json_report

AGAINST_FORMAT = 1


class _Cell(msgspec.Struct):
    status: Status
    max_share: float = 0.0


class _Pairs(msgspec.Struct):
    refused: dict[str, int] = {}


class _Coverage(msgspec.Struct):
    not_exercised: dict[str, str] = {}
    pairs: _Pairs | None = None


class _Implementation(msgspec.Struct):
    obligations: dict[str, _Cell]
    coverage: _Coverage
    unsupported: dict[str, int] = {}
    cases_digest: str = ""
    memory: Any = None


class _FindingEntry(msgspec.Struct):
    implementation: str
    fingerprint: str
    title: str
    status: Status
    obligation: str | None = None


class _Known(msgspec.Struct):
    seen: list[_FindingEntry] = []


class _RunEntry(msgspec.Struct):
    profile: str
    seed: int
    world_sizes: tuple[int, ...]
    obligations: tuple[str, ...]
    cases: int
    outcome: str


class ComparedReport(msgspec.Struct):
    """Fields of a report.json that are compared."""

    format: int
    environment: Environment | None
    run: _RunEntry
    implementations: dict[str, _Implementation]
    findings: list[_FindingEntry]
    known_issues: _Known


# Lax, since numbers that JSON cannot hold stand as strings.
_decoder = msgspec.json.Decoder(ComparedReport, strict=False)


@dataclass(frozen=True)
class ComparedRow:
    """Earlier and current value of one thing. of: the implementation, empty for the whole run."""

    of: str
    what: str
    before: Any
    now: Any

    @property
    def factor(self) -> float:
        """Ratio of the current number to the earlier one; infinite where that was 0."""
        if self.before == 0 or math.isinf(self.now):
            return math.inf
        return float(self.now / self.before)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Differences between two runs.

    exit_code: 1 if something is newly violated, or no longer checked at all, or nothing that was
    checked before is in this run.
    """

    notes: list[str]
    environment: list[ComparedRow]
    newly_violated: list[ComparedRow]
    no_longer_checked: list[ComparedRow]
    fixed: list[ComparedRow]
    newly_known: list[ComparedRow]
    unsupported: list[ComparedRow]
    refused_pairs: list[ComparedRow]
    newly_not_exercised: list[ComparedRow]
    newly_exercised: list[ComparedRow]
    shares: list[ComparedRow]
    memory: list[ComparedRow]
    exit_code: int


def report_of(counted: Tally) -> ComparedReport:
    """Return the report of a run, as `read_report` returns it."""
    return _decoder.decode(json_report.render(counted))


def read_report(path: Path) -> ComparedReport:
    """Read the report of an earlier run: a journal, a report.json, or the directory with them.

    Raises UsageError for anything else.
    """
    if path.is_dir():
        names = ("journal.ndjson", "report.json")
        path = next((path / name for name in names if (path / name).is_file()), path / names[0])
    if is_matrix(path):
        raise UsageError(f"{path} is the journal of a kill matrix, not of a run")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    try:
        first = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return report_of(tally(read(path)))
    if isinstance(first, dict) and first.get("type") == "run started":
        return report_of(tally(read(path)))  # a journal of one line
    given = first.get("format") if isinstance(first, dict) else None
    if given != json_report.REPORT_FORMAT:
        raise UsageError(
            f"{path} is no report.json of format {json_report.REPORT_FORMAT}, and no journal"
        )
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is not a report.json: {error}") from error


def compare(now: ComparedReport, before: ComparedReport) -> Changes:
    """Return the changes from `before` to `now`, in implementations that both have."""
    both = [name for name in now.implementations if name in before.implementations]
    pairs = [(name, now.implementations[name], before.implementations[name]) for name in both]
    newly_violated = _new_findings(now, before, both)
    no_longer = [
        ComparedRow(name, obligation, cell.status, after)
        for name, one, other in pairs
        for obligation, cell in other.obligations.items()
        if cell.status in ("holds", "known", *FAILING)
        and (after := _status(one, obligation)) in ("unsupported", "not exercised")
        and obligation in now.run.obligations
    ]
    code = 1 if newly_violated or no_longer or (before.implementations and not both) else 0
    return Changes(
        notes=list(_notes(now, before, both)),
        environment=list(_environment(now, before)),
        newly_violated=newly_violated,
        no_longer_checked=no_longer,
        fixed=list(_fixed(now, before, both)),
        newly_known=[
            ComparedRow(known.implementation, known.title, "", known.fingerprint)
            for known in now.known_issues.seen
            if known.implementation in both
            and known.fingerprint not in _fingerprints(before, known=True)
        ],
        unsupported=[
            row
            for name, one, other in pairs
            for row in _counts(name, one.unsupported, other.unsupported)
        ],
        refused_pairs=[
            row
            for name, one, other in pairs
            for row in _counts(name, _refused(one), _refused(other))
        ],
        newly_not_exercised=[
            ComparedRow(name, feature, "", reason)
            for name, one, other in pairs
            for feature, reason in one.coverage.not_exercised.items()
            if feature not in other.coverage.not_exercised
        ],
        newly_exercised=[
            ComparedRow(name, feature, reason, "")
            for name, one, other in pairs
            for feature, reason in other.coverage.not_exercised.items()
            if feature not in one.coverage.not_exercised
        ],
        shares=_farthest_first(
            ComparedRow(name, obligation, other.obligations[obligation].max_share, cell.max_share)
            for name, one, other in pairs
            for obligation, cell in one.obligations.items()
            if obligation in other.obligations
        ),
        memory=_farthest_first(
            row for name, one, other in pairs for row in _figures(name, one.memory, other.memory)
        ),
        exit_code=code if now.run.outcome == "done" else ExitCode.INTERRUPTED,
    )


def _status(implementation: _Implementation, obligation: str) -> Status:
    cell = implementation.obligations.get(obligation)
    return "not exercised" if cell is None else cell.status


def _fingerprints(report: ComparedReport, *, known: bool = False) -> set[str]:
    findings = [*report.findings, *(report.known_issues.seen if known else ())]
    return {finding.fingerprint for finding in findings}


def _new_findings(
    now: ComparedReport, before: ComparedReport, both: list[str]
) -> list[ComparedRow]:
    """Return new findings, and obligations that fail now without one, as consequences do."""
    there = _fingerprints(before)
    new = [f for f in now.findings if f.implementation in both and f.fingerprint not in there]
    rows = [ComparedRow(f.implementation, f.title, "", f.fingerprint) for f in new]
    pairs = {(f.implementation, f.obligation) for f in new}
    for name in both:
        for obligation, cell in now.implementations[name].obligations.items():
            was = _status(before.implementations[name], obligation)
            silent = not {(name, obligation), (name, None)} & pairs
            if cell.status in FAILING and was not in FAILING and silent:
                rows.append(ComparedRow(name, obligation, was, cell.status))
    return rows


def _fixed(now: ComparedReport, before: ComparedReport, both: list[str]) -> Iterator[ComparedRow]:
    """Yield findings and known issues that do not show any more."""
    there = _fingerprints(now, known=True)
    for finding in (*before.findings, *before.known_issues.seen):
        if finding.implementation in both and finding.fingerprint not in there:
            yield ComparedRow(finding.implementation, finding.title, finding.fingerprint, "")


def _refused(implementation: _Implementation) -> dict[str, int]:
    pairs = implementation.coverage.pairs
    return {} if pairs is None else pairs.refused


def _counts(name: str, now: Mapping[str, int], before: Mapping[str, int]) -> Iterator[ComparedRow]:
    """Yield reasons with changed counts; a new or vanished one has a count of 0 on one side."""
    for reason in dict.fromkeys((*now, *before)):
        row = ComparedRow(name, reason, before.get(reason, 0), now.get(reason, 0))
        if row.before != row.now:
            yield row


def _figures(name: str, now: Any, before: Any, path: str = "") -> Iterator[ComparedRow]:
    """Yield measured numbers at the same place in both.

    Entries with a world size are matched by it.
    """
    if isinstance(now, list) and isinstance(before, list):
        now, before = _named(now), _named(before)
    if isinstance(now, dict) and isinstance(before, dict):
        for key in now:
            if key in before:
                place = f"{path}, {key}" if path else str(key)
                yield from _figures(name, now[key], before[key], place)
    elif _is_number(now) and _is_number(before):
        yield ComparedRow(name, path, before, now)


def _named(items: list[Any]) -> dict[str, Any]:
    return {
        f"{item['world_size']} ranks"
        if isinstance(item, dict) and "world_size" in item
        else str(place): item
        for place, item in enumerate(items)
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _farthest_first(rows: Iterator[ComparedRow]) -> list[ComparedRow]:
    """Sort the rows that changed by the factor, up or down, largest first."""

    def distance(row: ComparedRow) -> float:
        return math.inf if row.factor in (0.0, math.inf) else abs(math.log(abs(row.factor)))

    return sorted((row for row in rows if row.before != row.now), key=distance, reverse=True)


def _environment(now: ComparedReport, before: ComparedReport) -> Iterator[ComparedRow]:
    for name in Environment.__struct_fields__:
        was, is_ = (
            getattr(report.environment, name) if report.environment else "not recorded"
            for report in (before, now)
        )
        if was != is_:
            yield ComparedRow("", name, was, is_)


def _notes(now: ComparedReport, before: ComparedReport, both: list[str]) -> Iterator[str]:
    """Yield the limits of the comparison."""
    for name in ("profile", "seed", "world_sizes", "obligations"):
        was, is_ = getattr(before.run, name), getattr(now.run, name)
        if was != is_:
            yield f"the runs differ in {name.replace('_', ' ')}: {_plain(was)}, now {_plain(is_)}"
    for report, which in ((before, "the earlier run"), (now, "this run")):
        if report.run.outcome != "done":
            cases = report.run.cases
            yield f"{which} did not finish: it has {cases} case{'' if cases == 1 else 's'}"
    others = [name for name in both if _digests(now, before, name)]
    if others:
        yield (
            f"the cases are not the same for {', '.join(others)}: a finding may be new, or gone, "
            "since other cases were run"
        )
    elif both:
        yield "the cases are the same"
    for report, which in ((before, "the earlier run"), (now, "this run")):
        only = [name for name in report.implementations if name not in both]
        if only:
            yield f"only in {which}, and not compared: {', '.join(only)}"


def _digests(now: ComparedReport, before: ComparedReport, name: str) -> bool:
    """Return True if the cases differ, or if it is not known."""
    one, other = (report.implementations[name].cases_digest for report in (now, before))
    return not one or one != other


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
