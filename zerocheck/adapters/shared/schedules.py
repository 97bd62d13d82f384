"""Releases of torch whose schedules the predictions were compared with.

Which collectives a wrapper calls, and what it holds meanwhile, is no promise of torch. The rules
were read from its source and compared with what ranks did in each of these releases. Of another one
nothing is predicted, rather than something wrong.
"""

from __future__ import annotations

import torch

from ...case.schema import Case
from ...contract.layout import Layout
from .calls import CollectivePrediction, with_collectives

COMPARED = ("2.11", "2.12", "2.13", "2.14", "2.15")


def unknown_schedule() -> str:
    """Return why nothing is predicted in this release, or an empty text."""
    release = ".".join(torch.__version__.split(".")[:2])
    if release in COMPARED:
        return ""
    return f"the schedule of torch {release} was not compared with the predictions"


def with_schedule(
    held: Layout | None, prediction: CollectivePrediction | None, case: Case
) -> Layout | None:
    """Add predicted calls and live memory of a wrapper of torch, where its schedule is known."""
    return held if unknown_schedule() else with_collectives(held, prediction, case)


def without_schedule() -> dict[str, str]:
    """Return the obligations that nothing can be compared with in this release, and why."""
    reason = unknown_schedule()
    return {"peak": reason, "communication": reason} if reason else {}
