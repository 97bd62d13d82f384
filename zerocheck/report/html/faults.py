"""Known faults on the page: one card for each, with severity, place, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

from ...foreign_text import one_line
from ...run.records.tally import Tally
from ..known_faults import SEVERITIES, SILENT, KnownFault, known_faults
from .findings import FindingView, shown

SHORT = ("wrong numbers", "after a load", "crash", "memory")
"""SEVERITIES in a column's head."""


@dataclass(frozen=True)
class FaultView:
    """Known fault. facts: (label, text)."""

    title: str
    severity: str
    silent: bool
    implementations: tuple[str, ...]
    obligations: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    findings: tuple[FindingView, ...]


def fault_views(counted: Tally) -> list[FaultView]:
    """Return the known faults that showed, the most severe first."""
    return [_view(fault) for fault in known_faults(counted)]


def _view(fault: KnownFault) -> FaultView:
    cases = fault.cases
    conditions = fault.conditions
    # Of a single case nobody knows which of its features the fault needs.
    needs = "needs" if cases.total() > 1 else "seen once, with"
    facts = [
        ("avoid it", fault.known.avoid),
        ("shows in", ", ".join(f"{name} ({count})" for name, count in cases.items())),
        (needs, "; or ".join(conditions[:3]) + (" …" if len(conditions) > 3 else "")),
        ("obligations", ", ".join(fault.obligations)),
        ("upstream", ", ".join(fault.links)),
        ("page", fault.known.page),
    ]
    return FaultView(
        title=one_line(fault.known.reason),
        severity=SEVERITIES[fault.severity],
        silent=fault.severity < SILENT,
        implementations=tuple(cases),
        obligations=tuple(fault.obligations),
        facts=tuple((label, one_line(text)) for label, text in facts if text),
        findings=tuple(shown(one) for one in fault.findings),
    )
