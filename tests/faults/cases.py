"""Which cases a fault is shown."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from zerocheck.case.drawing import draw
from zerocheck.case.features import features
from zerocheck.case.schema import Case
from zerocheck.faults.catalogue import Fault

MOST = 12
"""Cases until a fault must have been caught."""

DELAY = 2.0
"""Milliseconds, as cases are drawn that have delays."""


@cache
def drawn(
    world_size: int, microbatches: int, *, later: bool = False, delays: bool = False
) -> list[tuple[Case, frozenset[str]]]:
    """Cases with their features. Only `later` ones start in mid-training, since not every
    implementation does; all have `delays`, or it is left to chance."""
    fixed: dict[str, object] = {} if later else {"start": {"step": 0, "moments": "zero"}}
    if delays:  # one of 25 has them, which is not enough
        fixed["disturbance"] = {"delay": DELAY}
    if microbatches > 1:
        fixed["training"] = {"microbatches": microbatches}
    cases = draw(700, seed=world_size, world_sizes=(world_size,), fixed=fixed)
    return [(case, frozenset(features(case))) for case in cases[1:]]


def cases_for(fault: Fault) -> Iterator[Case]:
    """Up to MOST cases, of the smallest world size that shows it and of the next."""
    queues = [
        (
            case
            for case, has in drawn(
                size,
                fault.microbatches,
                later="mid-training" in fault.features,
                delays="delays" in fault.features,
            )
            if set(fault.features) <= has and not has & set(fault.without)
        )
        for size in (fault.world, fault.world + 1)
    ]
    for position in range(MOST):
        # The larger team is slower, and needed only to tell causes apart.
        case = next(queues[position % 3 == 1], None)
        if case is not None:
            yield case
