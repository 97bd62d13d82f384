"""Report report.json: the form for machines."""

from __future__ import annotations

from typing import Any

import msgspec

from ..protocol.verdicts import STATUSES
from ..run.records.finding_text import replay_line
from ..run.records.journal import encode
from ..run.records.records import Finding
from ..run.records.tally import ImplementationTally, Tally, run_exit_code, why
from . import coverage, footprint, loads
from .sections import placement

REPORT_FORMAT = 2


def render(counted: Tally) -> str:
    """Render the whole report as JSON. Numbers that JSON cannot hold become "inf" and "nan"."""
    return msgspec.json.format(encode(as_data(counted)), indent=2).decode() + "\n"


def as_data(counted: Tally) -> dict[str, Any]:
    """Return the report as plain data."""
    started, finished = counted.started, counted.finished
    return {
        "format": REPORT_FORMAT,
        "environment": started.environment if started else None,
        "run": {
            "profile": started.profile if started else "",
            "without": dict(started.without) if started else {},
            "without_of": dict(started.without_of) if started else {},
            "model": started.model if started else "",
            "seed": started.seed if started else 0,
            "world_sizes": started.world_sizes if started else (),
            "obligations": counted.obligations,
            "started": started.started if started else None,
            "seconds": finished.seconds if finished else None,
            "planned": counted.planned,
            "cases": counted.cases,
            "outcome": finished.outcome if finished else "interrupted",
        },
        "exit_code": finished.exit_code if finished else run_exit_code(counted),
        "why": why(counted),
        "implementations": {
            name: _implementation(implementation)
            for name, implementation in counted.implementations.items()
        },
        "loads": loads.as_data(counted.loads),
        "findings": _findings(counted.findings),
        "unreproduced": _findings(counted.unreproduced),
        "known_issues": {
            "seen": _findings(counted.known),
            "stale": counted.stale,
            "left_out": started.left_out if started else (),
            "unverified": started.unverified if started else (),
        },
    }


def _findings(findings: list[Finding]) -> list[dict[str, Any]]:
    return [
        {**msgspec.to_builtins(finding), "replay": replay_line(finding)} for finding in findings
    ]


def _implementation(implementation: ImplementationTally) -> dict[str, Any]:
    return {
        "cases": {status: implementation.cases[status] for status in STATUSES},
        "obligations": {
            obligation: {
                "status": cell.status,
                "verdicts": {status: cell.counts[status] for status in STATUSES},
                "max_share": cell.share,
            }
            for obligation, cell in implementation.cells.items()
        },
        "loads": loads.as_data(implementation.loads),
        "memory": footprint.as_data(implementation),
        "coverage": coverage.as_data(implementation),
        "cases_digest": implementation.digest,
        "unsupported": dict(implementation.unsupported),
        "unjudged": dict(implementation.unjudged),
        "tiers": dict(implementation.tiers),
        "leaks": dict(implementation.leaks),
        "placement": placement(implementation),
        "semantics": implementation.semantics,
        "seconds": implementation.seconds,
    }
