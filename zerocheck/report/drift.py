"""Text of free runs: the drift of implementations, next to that of a replica of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..run.records.finding_text import number
from ..run.records.records import Drift

TITLE = "Left to itself"
EXPLAINED = (
    "Some cases are trained freely, without the judge between the steps, and compared with the "
    "reference. AdamW divides by a root of squares, so right trainers drift apart too: the replica "
    "is the reference with other round-off, its gradients summed in fp32 and in another order of "
    "ranks. Drift informs, and no verdict depends on it: a fault may show little (AdamW is nearly "
    "blind to the scale of a gradient), and round-off may grow."
)
HEADERS = (
    "step", "loss, reference", "loss", "loss, replica", "relative drift", "of the replica",
    "largest drift", "of the replica",
)  # fmt: skip


def title(drift: Drift) -> str:
    """Name the case: implementation, ranks, microbatches."""
    case = drift.case
    count = case.training.microbatches
    microbatches = f", {count} microbatches" if count > 1 else ""
    ranks = f"{case.world_size} rank{'s' if case.world_size > 1 else ''}"
    return f"{drift.implementation}, {ranks}{microbatches}"


def sentence(drift: Drift) -> str:
    """Return a sentence on the deviation after the last step."""
    if drift.own is None or drift.replica is None:
        return f"It could not be left to itself: {drift.broken}"
    steps = len(drift.expected)
    own, replica = drift.own.relative[-1], drift.replica.relative[-1]
    parts = "" if drift.parts is None else f" It is violated in step {drift.parts}."
    return (
        f"After {steps} step{'s' if steps > 1 else ''} its parameters are {_far(own)} from the "
        f"reference, relative to their 2-norm, those of the replica {_far(replica)}.{parts}"
    )


def _far(value: float) -> str:
    return number(value, digits=2) if value else "0 (bit for bit)"


def rows(drift: Drift) -> list[list[str]]:
    """Return a row for each step; none if the free run failed."""
    own, replica = drift.own, drift.replica
    if own is None or replica is None:
        return []
    columns: Sequence[Sequence[float]] = (
        drift.expected, own.losses, replica.losses, own.relative, replica.relative, own.largest,
        replica.largest,
    )  # fmt: skip
    digits = (6, 6, 6, 2, 2, 2, 2)
    return [
        [str(step), *(number(v, digits=d) for v, d in zip(values, digits, strict=True))]
        for step, values in enumerate(zip(*columns, strict=True))
    ]


def as_data(drifts: Sequence[Drift]) -> list[dict[str, Any]]:
    """Return free runs for the JSON report."""
    return [msgspec.to_builtins(one) for one in drifts]
