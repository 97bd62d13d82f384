"""A report of checkpoints as text."""

from __future__ import annotations

from collections.abc import Iterator

from tabulate import tabulate

from ..foreign_text import one_line
from .result import CHECKS, COMPARED, UNREAD, CheckpointProblem, CheckpointReport, CheckpointSummary

_SHOWN = 5
_UNITS = ("B", "KB", "MB", "GB", "TB")
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "momentum", "nesterov")


def render(report: CheckpointReport) -> str:
    """Render the report as text: the content of each checkpoint, findings, checks."""
    lines: list[str] = []
    for described in report.checkpoints:
        lines += [*_described(described), ""]
    two = len(report.checkpoints) > 1
    lines += [f"note: {one_line(note)}" for note in report.notes]
    for check in dict.fromkeys(finding.check for finding in report.findings):
        word = "DIFFERENT" if two and check in COMPARED else "WRONG"
        word = "NOT READ" if check == UNREAD else word
        lines += _found([one for one in report.findings if one.check == check], word)
    lines += [f"not checked: {check} ({one_line(why)})" for check, why in report.unchecked.items()]
    word = "checked" if report.findings else "verified"  # what is damaged was not verified
    lines += [f"{word}: {one_line(one)}" for one in report.verified]
    lines += [f"cannot be verified: {one_line(one)}" for one in report.unverifiable]
    names = ", ".join(report.checked)
    if report.findings:
        if report.intact:
            lines += _intact(report)
        count = len(report.findings)
        word = "different" if two else "wrong"
        if all(one.check == UNREAD for one in report.findings):
            word = "not all of it is read"
        lines.append(f"{word}: {count} finding{'s' * (count > 1)}")
    else:
        lines.append(f"{'equal, bit for bit' if two else 'nothing wrong'}: {names}")
        if report.loads:
            lines.append(f"loads {one_line(report.loads)}")
    return "\n".join(lines) + "\n"


def _described(one: CheckpointSummary) -> Iterator[str]:
    yield f"{one_line(one.path)}: {one.format}"
    if one.roles:
        rows = [
            (
                one_line(role.role),
                role.tensors,
                f"{role.elements:,}",
                ", ".join(role.dtypes),
                _size(role.nbytes),
                f"{role.nbytes / one.psi:.2f} Psi" if one.psi else "",
            )
            for role in one.roles
        ]
        total = sum(role.nbytes for role in one.roles)
        rows.append(
            ("total", sum(role.tensors for role in one.roles),
             f"{sum(role.elements for role in one.roles):,}", "", _size(total),
             f"{total / one.psi:.2f} Psi" if one.psi else "")
        )  # fmt: skip
        headers = ("role", "tensors", "elements", "dtype", "size", "bytes")
        align = ("left", "right", "right", "left", "right", "right")
        table = tabulate(rows, headers, tablefmt="simple", colalign=align, disable_numparse=True)
        yield from (f"  {line}" for line in table.splitlines())
    if one.psi:
        sgd = any(role.role == "momentum_buffer" for role in one.roles)
        usual = "SGD in fp32: 4 Psi of parameters and 4 Psi of momentum, 8 Psi"
        if not sgd:
            usual = "AdamW in fp32: 4 Psi of parameters and 8 Psi of moments, 12 Psi"
        yield f"  Psi = {one.psi:,} elements with {'momentum' if sgd else 'moments'}; {usual}"
    if one.steps:
        steps = ", ".join(f"{step} ({count})" for step, count in one.steps.items())
        yield f"  steps (parameters): {steps}"
    for group in one.groups:
        known = ", ".join(
            f"{word} {group.settings[word]}" for word in _SETTINGS if word in group.settings
        )
        yield f"  param group of {len(group.parameters)}: {one_line(known)}"


def _found(findings: list[CheckpointProblem], word: str) -> Iterator[str]:
    check = findings[0].check
    yield f"{word} {check}: {CHECKS[check]}"
    for finding in findings[:_SHOWN]:
        yield f"  {one_line(finding.where)}: {one_line(finding.detail)}"
    if len(findings) > _SHOWN:
        yield f"  and {len(findings) - _SHOWN} more"


def _intact(report: CheckpointReport) -> Iterator[str]:
    """Say how many tensors of each role no finding names: what can still be used."""
    roles = [
        f"{one_line(role.role)} {report.intact.get(role.role, 0)} of {role.tensors}"
        for role in report.checkpoints[0].roles
    ]
    if roles:
        yield f"tensors without a finding: {', '.join(roles)}"


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in _UNITS:
        if size < 1000 or unit == _UNITS[-1]:
            return f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError
