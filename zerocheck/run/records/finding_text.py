"""Text of a finding, in the same words on the console, in reports, in pytest and in `attach`."""

from __future__ import annotations

from ...catalogue import command_name, in_session, is_config
from ...causes.registry import find
from ...foreign_text import copyable, one_line, printable
from ...protocol.verdicts import ESTIMATED, TITLES, Violation
from .records import Finding, KnownReference

_LABEL_WIDTH = 12
_SHOWN = 3
"""Names that are spelled out before the rest is counted."""


def finding_title(finding: Finding) -> str:
    """Return the title of a finding: `"VIOLATED zero2: the gradient is ..."`.

    Or KNOWN or NOT REPRODUCED, and how often if it is intermittent.
    """
    label = finding.status.upper() if finding.known is None else "KNOWN"
    label = "NOT REPRODUCED" if finding.suspicion else label
    often = ""
    if finding.intermittent:
        often = f" (intermittent: {finding.confirmed} of {finding.tries})"
    title = ". ".join(part for part in (f"{finding.title}{often}", finding.hint) if part)
    return one_line(f"{label} {finding.implementation}: {title}")


def finding_lines(finding: Finding) -> list[str]:
    """Return the finding as lines, without markup and without control characters."""
    lines = [finding_title(finding)]
    if finding.known is not None:
        lines += known_lines(finding.known)
    if finding.violation is not None:
        lines += _violation_lines(finding.violation, title=finding.title)
    if finding.estimated:
        lines += row("bound", ESTIMATED)
    causes = finding.causes or (finding.violation.causes if finding.violation else ())
    if finding.status == "violated" or causes:
        lines += row("cause", _causes(causes))
    if finding.known is None and len(causes) == 1 and (cause := find(causes[0])):
        lines += row("usual", cause.usual)
    if finding.similar is not None:
        lines += similar_lines(finding.similar)
    if finding.variant:
        lines += row("also", finding.variant)
    if finding.extent:
        lines += row("extent", finding.extent)
    if finding.follows:
        note = "violated in cases that show this, and may follow from it"
        lines += row("also", f"{', '.join(finding.follows)}: {note}")
    if finding.reason:
        lines += row("reason", finding.reason)
    if finding.tries:
        lines += row("reproduced", _reproduced(finding))
    lines += row("fingerprint", finding.fingerprint)
    if finding.size:
        lines += row("smallest", finding.size)
    if finding.case_file:
        lines += row("replay", _replay(finding))
    return lines


def replay_call(finding: Finding) -> str:
    """Return the call that replays a finding of `zerocheck.run` in Python."""
    return f"result.findings[{'N' if finding.number else 0}].replay()"


def _replay(finding: Finding) -> str:
    """Return how to replay a finding; code without a file is replayed where it was defined."""
    names = (finding.implementation, finding.model, finding.optimizer)
    labels = [name.partition(":")[2] for name in names if in_session(name)]
    if not labels:
        return replay_line(finding)
    return (
        f"{replay_call(finding)} on the result of zerocheck.run\n"
        f"or put {' and '.join(labels)} into a file: {replay_line(finding)}"
    )


def known_lines(known: KnownReference) -> list[str]:
    """Return reason, link and page of an entry, and where it is listed."""
    lines = row("known", known.reason)
    if known.link:
        lines += row("link", known.link)
    if known.page:
        lines += row("page", known.page)
    return [*lines, *row("listed in", known.source)]


def similar_lines(known: KnownReference) -> list[str]:
    """Return what is known of other code that fails in the same way, and what to do."""
    text = f"known issue of {known.fingerprint.split(' / ')[0]}: {known.reason}"
    places = (known.page, known.link, known.avoid)
    return row("similar", "\n".join(part for part in (text, *places) if part))


def _reproduced(finding: Finding) -> str:
    """Describe how often a finding was reproduced in fresh rank processes.

    Where that was not always, possible reasons are added.
    """
    counts = f"{finding.confirmed} of {finding.tries} times in fresh rank processes"
    if finding.confirmed == finding.tries:
        return counts
    others = ", ".join(f"{what} {count}" for what, count in finding.otherwise.items())
    counts += f" (otherwise: {others})" if others else ""
    if finding.confirmed:
        return f"intermittent: {counts}\na race, or memory that is read before it is written"
    occurrence = "seen once" if finding.cases == 1 else f"seen in {finding.cases} cases"
    return f"{occurrence}, {counts}"


def finding_text(finding: Finding) -> str:
    """Return `finding_lines` as one text."""
    return "\n".join(finding_lines(finding))


def replay_line(finding: Finding) -> str:
    """Return the command that replays the finding, or an empty text if no case file was written.

    A user's implementation, model or optimizer is named again, since `replay` imports no code that
    only a file names.
    """
    if not finding.case_file:
        return ""
    command = ["zerocheck", "replay", finding.case_file]
    if ":" in finding.implementation or is_config(finding.implementation):
        command += ["--implementation", command_name(finding.implementation)]
    if finding.model:
        command += ["--model", command_name(finding.model)]
    if finding.optimizer:
        command += ["--optimizer", command_name(finding.optimizer)]
    return copyable(command)


def _violation_lines(violation: Violation, *, title: str) -> list[str]:
    lines = row("obligation", f"{violation.obligation}: {TITLES[violation.obligation]}")
    if violation.explanation not in title:
        lines += row("what", violation.explanation)
    if violation.attribution and violation.attribution not in (title, violation.explanation):
        lines += row("made of", violation.attribution)
    lines += row("where", _where(violation))
    if violation.tensors:
        lines += row("tensors", _some(violation.tensors))
    if violation.observed is not None or violation.expected is not None:
        lines += row("element", _element(violation))
    if violation.total:
        lines += row("wrong", f"{violation.wrong} of {violation.total} elements")
    if violation.mild:
        lines += row("mild", "only what is reported is wrong; the parameters are right")
    return lines


def _where(violation: Violation) -> str:
    step = "before the first step" if violation.step < 0 else f"step {violation.step}"
    ranks = violation.ranks
    parts = [step, f"role {violation.role}" if violation.role else ""]
    if ranks:
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {_some([str(rank) for rank in ranks])}")
    return ", ".join(part for part in parts if part)


def _element(violation: Violation) -> str:
    place = ""
    if violation.element and violation.tensors:
        index = ", ".join(map(str, violation.element))
        place = f"{violation.tensors[0]}[{index}]: "
    parts = [
        f"{label} {number(value)}"
        for label, value in (
            ("observed", violation.observed),
            ("expected", violation.expected),
            ("bound", violation.bound),
        )
        if value is not None
    ]
    if violation.ratio is not None:
        parts.append(f"{number(violation.ratio, digits=3)} times the bound")
    return place + ", ".join(parts)


def _causes(causes: tuple[str, ...]) -> str:
    if not causes:
        return "no known bug explains it"
    if len(causes) == 1:
        return causes[0]
    return f"one of: {'; '.join(causes)} (the cases that failed do not tell them apart)"


def _some(names: tuple[str, ...] | list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def row(label: str, text: str) -> list[str]:
    """Format `  label       text`, further lines of the text below the first."""
    lines = [line.rstrip() for line in printable(text).split("\n") if line.strip()] or [""]
    gap = " " * (_LABEL_WIDTH + 2)
    first = f"  {label:<{_LABEL_WIDTH}}{lines[0]}"
    return [first.rstrip(), *(gap + line for line in lines[1:])]


def number(value: float, *, digits: int = 9) -> str:
    """Format a number; 9 digits distinguish all float32 values."""
    return f"{value:.{digits}g}"
