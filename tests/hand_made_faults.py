"""Records of a kill matrix made by hand."""

from __future__ import annotations

from typing import Any

from hand_made import ENVIRONMENT

from zerocheck.case.schema import Case
from zerocheck.protocol.verdicts import EQUIVALENCE
from zerocheck.run.records.matrix_records import FaultsFinished, FaultsStarted, FaultTried


def started(*names: str, **given: Any) -> FaultsStarted:
    """The first record."""
    fields: dict[str, Any] = {
        "environment": ENVIRONMENT,
        "faults": names,
        "profile": "ci",
        "seed": 0,
        "world_sizes": (2, 3),
        "obligations": EQUIVALENCE,
        "started": 1_700_000_000.0,
    }
    return FaultsStarted(**{**fields, **given})


def tried(name: str, **given: Any) -> FaultTried:
    """A fault that was caught, and named right."""
    fields: dict[str, Any] = {
        "fault": name,
        "where": f"faults:{name}",
        "parent": "zero1",
        "summary": "the sum is an average",
        "source": "PT #1",
        "expected": "gradient",
        "true_causes": ("gradient x W",),
        "caught_by": "gradient",
        "title": "gradient is 3 times too large: summed over 3 ranks, not averaged",
        "cases": 2,
        "seconds": 0.5,
        "failing": 3,
        "causes": ("gradient x W",),
        "findings": 1,
        "case": Case(seed=len(name)),
    }
    return FaultTried(**{**fields, **given})


DONE = FaultsFinished(outcome="done", exit_code=0, seconds=60.0)
