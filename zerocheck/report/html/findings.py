"""Finding as fields of a page: place, size, cause, and the command to replay it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...foreign_text import one_line, printable
from ...protocol.verdicts import Violation
from ...run.records.finding_text import finding_lines, finding_title, number, replay_line
from ...run.records.records import Finding
from .matrix import kind_of


@dataclass(frozen=True)
class FindingView:
    """Finding on the page.

    facts: (label, text); decades: by how many powers of ten it is beyond its bound, None where
    there is no such number; replay: the command, or empty; detail: stacks; lines: as the console
    has it.
    """

    number: int
    kind: str
    title: str
    facts: tuple[tuple[str, str], ...]
    decades: float | None
    ratio: str
    replay: str
    detail: str
    lines: str


def shown(finding: Finding) -> FindingView:
    """Return a finding of the run, or a known issue that it observed, for the page.

    The rest of a known issue stands with its fault.
    """
    known = finding.known is not None
    facts: list[tuple[str, str]] = []
    decades, ratio = None, ""
    violation = finding.violation
    if violation is not None:
        facts.append(("obligation", violation.obligation))
        if not known:
            facts += _numbers(violation)
        if violation.ratio is not None and math.isfinite(violation.ratio):
            ratio = number(violation.ratio, digits=3)
            decades = max(0.0, math.log10(violation.ratio)) if violation.ratio > 0 else 0.0
    if violation is not None and violation.attribution and not known:
        facts.append(("made of", violation.attribution))
    if finding.variant and not known:
        facts.append(("also", finding.variant))
    causes = finding.causes or (violation.causes if violation is not None else ())
    if causes:
        facts.append(("cause", ", ".join(causes)))
    for label, text in (
        ("extent", finding.extent),
        ("may follow", ", ".join(finding.follows)),
        ("reason", "" if known else finding.reason),
        ("smallest", finding.size),
        ("cases", str(finding.cases)),
        ("fingerprint", finding.fingerprint),
    ):
        if text:
            facts.append((label, text))
    if finding.tries:
        facts.append(("reproduced", f"{finding.confirmed} of {finding.tries} times"))
    return FindingView(
        number=finding.number,
        kind="known" if known or finding.suspicion else kind_of(finding.status),
        title=finding_title(finding),
        facts=tuple((label, _lines(text)) for label, text in facts),
        decades=decades,
        ratio=ratio,
        replay=replay_line(finding),
        detail="" if known else finding.detail,
        lines="\n".join(finding_lines(finding)[1:]),
    )


def _numbers(violation: Violation) -> Iterator[tuple[str, str]]:
    ranks = ", ".join(map(str, violation.ranks)) or "all"
    step = "before the first step" if violation.step < 0 else f"step {violation.step}"
    yield "parts at", f"{step}, {violation.role}, ranks: {ranks}"
    if violation.tensors:
        yield "tensors", ", ".join(violation.tensors)
    if violation.observed is not None and violation.expected is not None:
        yield "observed", number(violation.observed)
        yield "expected", number(violation.expected)
    if violation.bound is not None:
        yield "bound", number(violation.bound)
    if violation.total:
        yield "wrong", f"{violation.wrong:,} of {violation.total:,} elements"


def _lines(text: str) -> str:
    """`text` in printable characters; its lines stay apart, as those of the ranks in a reason."""
    return "\n".join(map(one_line, printable(text).splitlines()))
