"""Text of known issues: those observed, stale ones, and cases left out because of them."""

from __future__ import annotations

from collections.abc import Sequence

from ..foreign_text import one_line
from ..protocol.verdicts import Obligation
from ..run.known_issues.entries import KnownIssue
from ..run.records.finding_text import known_lines, row
from ..run.records.records import StaleIssue
from ..run.records.tally import Tally, concerns
from .known_faults import faults_sentence, known_faults


def stale_lines(stale: StaleIssue) -> list[str]:
    """Return lines on a known issue that does not show any more, and what to do."""
    return [
        one_line(f"STALE {stale.implementation}: a known issue does not show any more"),
        *row("fingerprint", stale.known.fingerprint),
        *row("what", stale.seen),
        *row("to do", stale.advice),
        *known_lines(stale.known),
    ]


def all_hold(counted: Tally) -> str:
    """Return the sentences on a run without failures."""
    shard = counted.started.shard if counted.started is not None else ""
    of_shard = f"shard {one_line(shard)}: " if shard else ""
    known = faults_sentence(counted)
    verdict = "no new finding" if known else "all obligations hold"
    return f"{of_shard}{verdict}. {counted.outcomes}{'. ' if known else ''}{known}"


def left_out_lines(counted: Tally) -> list[str]:
    """Return one line for each known hang that cases were left out for."""
    started = counted.started
    return [
        one_line(
            f"{left.implementation}: {left.count} case{'s' if left.count > 1 else ''} left out: "
            f"known hang {left.known.fingerprint}: {left.known.reason}"
        )
        for left in (started.left_out if started is not None else ())
    ]


def fault_lines(counted: Tally) -> list[str]:
    """Return one line for each fault that is known and showed, whatever entries it has."""
    lines = []
    for fault in known_faults(counted):
        where = ", ".join(f"{name} {count}" for name, count in fault.cases.items())
        more = fault.known.page or fault.known.link
        text = f"{fault.known.reason} (cases: {where}{'; ' if more else ''}{more})"
        lines.append(one_line(f"KNOWN {text}"))
    return lines


def unverified_lines(counted: Tally) -> list[str]:
    """Return one line for each release of a run in which known issues were not measured."""
    started = counted.started
    lines = []
    for one in started.unverified if started is not None else ():
        count = len(one.known)
        issues = "1 known issue was" if count == 1 else f"{count} known issues were"
        lines.append(
            one_line(
                f"{one.release}: {issues} not measured in this release: what shows of them is "
                "known, and no run fails because one is gone"
            )
        )
    return lines


def known_issue_text(counted: Tally, implementation: str, obligation: Obligation) -> str:
    """Return the known issues behind an obligation, one line each.

    A violation that only follows from another obligation's has none of its own: then all.
    """
    of = [finding for finding in counted.known if finding.implementation == implementation]
    concerned = [finding for finding in of if concerns(finding, implementation, obligation)]
    lines = []
    for finding in concerned or of:
        if finding.known is not None:
            link = f" ({finding.known.link})" if finding.known.link else ""
            lines.append(one_line(f"{finding.title}: {finding.known.reason}{link}"))
    return "\n".join(dict.fromkeys(lines))


def stale_text(counted: Tally, implementation: str, obligation: Obligation) -> str:
    """Return the stale entries of this obligation."""
    return "\n\n".join(
        "\n".join(stale_lines(stale))
        for stale in counted.stale
        if concerns(stale, implementation, obligation)
    )


def listed_lines(issues: Sequence[KnownIssue]) -> list[str]:
    """Return every entry of a file: fingerprint, versions, features, reason and link."""
    lines = []
    for issue in issues:
        versions = str(issue.versions)
        lines.append(one_line(issue.fingerprint) + (f"  ({versions})" if versions else ""))
        if issue.features:
            lines.append(f"    with {', '.join(issue.features)}")
        fixed = f"fixed by {issue.fixed}" if issue.fixed else ""
        lines += [f"    {one_line(text)}" for text in (issue.reason, issue.link, fixed) if text]
    return lines or ["none are listed"]
