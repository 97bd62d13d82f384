"""Report faults.json: the kill matrix for machines."""

from __future__ import annotations

from typing import Any

import msgspec

from ..run.records.journal import encode
from ..run.records.matrix_records import FaultTried
from ..run.records.matrix_summary import Share, Summary

FORMAT = 2


def render(summary: Summary) -> str:
    """Render the whole matrix as JSON. Numbers that JSON cannot hold become "inf" and "nan"."""
    return msgspec.json.format(encode(as_data(summary)), indent=2).decode() + "\n"


def as_data(summary: Summary) -> dict[str, Any]:
    """Return the matrix as plain data."""
    return {
        "format": FORMAT,
        "run": summary.started,
        "outcome": "done" if summary.complete else "interrupted",
        "exit_code": summary.exit_code,
        "seconds": summary.finished.seconds if summary.finished else None,
        "planned": summary.planned,
        "summary": {
            "caught": _share(summary.caught),
            "median_cases": summary.median_cases,
            "median_seconds": summary.median_seconds,
            "diagnosis_seconds": summary.diagnosis,
            "as_expected": _share(summary.as_expected),
            "cause_named": _share(summary.named),
            "cause_named_alone": _share(summary.named_alone),
            "cause_named_by_any": _share(summary.named_by_any),
            "attributed": _share(summary.attributed),
            "attributed_always": _share(summary.attributed_always),
            "explained": _share(summary.explained),
            "small": {name: _share(share) for name, share in summary.small.items()},
        },
        "first_by": {word: [row.fault for row in rows] for word, rows in summary.first_by.items()},
        "without_effect": [row.fault for row in summary.without_effect],
        "shrunk": list(summary.shrunk.values()),
        "faults": [_row(row) for row in summary.rows],
    }


def _row(row: FaultTried) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(row),
        "caught": row.caught,
        "cause_named": row.named,
        "cause_named_alone": row.named_alone,
        "cause_named_by_any": row.named_by_any,
        "attributed": row.attributed,
    }


def _share(share: Share) -> dict[str, int]:
    return {"count": share.count, "of": share.of}
