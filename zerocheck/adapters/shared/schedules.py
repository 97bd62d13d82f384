"""Releases of torch whose schedules the predictions were compared with.

Which collectives a wrapper calls, and what it holds meanwhile, is no promise of torch. The rules
were read from its source and compared with what ranks did in each of these releases. Of another one
nothing is predicted, rather than something wrong.
"""

from __future__ import annotations

import torch

from ...case.schema import Case
from ...protocol.layout import Layout
from .calls import CollectivePrediction, with_collectives

COMPARED = ("2.11", "2.12", "2.13", "2.14", "2.15")


def with_schedule(
    held: Layout | None,
    prediction: CollectivePrediction | None,
    case: Case,
    *,
    memory_since: str = COMPARED[0],
) -> Layout | None:
    """Add predicted calls and live memory of a wrapper of torch, where its schedule is known.

    memory_since: the first release of which the live memory is known.
    """
    without = without_schedule(memory_since=memory_since)
    if "communication" in without or prediction is None:
        return held
    if "peak" in without:
        prediction = prediction._replace(highest=None)
    return with_collectives(held, prediction, case)


def without_schedule(*, memory_since: str = COMPARED[0]) -> dict[str, str]:
    """Return the obligations that nothing can be compared with in this release, and why."""
    release = ".".join(torch.__version__.split(".")[:2])
    if release not in COMPARED:
        reason = f"the schedule of torch {release} was not compared with the predictions"
        return {"peak": reason, "communication": reason}
    if COMPARED.index(release) < COMPARED.index(memory_since):
        return {"peak": f"torch {release} holds memory for other spans than since {memory_since}"}
    return {}
