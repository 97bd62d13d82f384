"""Known causes of a peak above the predicted one.

By the bytes of what is gathered and reduced in the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ... import causes as bugs
from ...case.schema import Case
from ...protocol.layout import Call, Phase, Term
from ...protocol.measurements import Measured
from ..obligations.communication import predicted

GATHERING = ("all_gather",)
REDUCING = ("all_reduce", "reduce_scatter", "reduce")


def causes(
    case: Case, measured: Measured, term: Term, phase: Phase, observed: int, expected: int
) -> Iterator[str]:
    """Find all causes that would hold as many bytes as observed.

    What is gathered or reduced once is as large as its collective. A cause is named if the excess
    is that of one of them, of several, or of all that there are.
    """
    layout = measured.layout
    if layout is None or layout.calls is None:
        return
    calls = predicted(layout, layout.last)
    surplus = observed - expected
    gathers = _sizes(calls, GATHERING, phase)
    reductions = _sizes(calls, REDUCING, "backward")
    if term == "gathered":
        if surplus in gathers or observed == 2 * expected:
            yield bugs.A_GATHERED_UNIT_TWICE
        if _adds_up(surplus, gathers):
            yield bugs.UNITS_NOT_FREED_BEFORE_THE_NEXT
    elif term == "bucket":
        if surplus in reductions or observed == 2 * expected:
            yield bugs.A_BUCKET_TWICE
        if _adds_up(surplus, reductions):
            yield bugs.WHOLE_GRADIENTS_KEPT_WITHIN_THE_STEP
    else:
        if surplus in gathers:
            yield bugs.A_GATHERED_UNIT_TWICE
        elif _adds_up(surplus, gathers):
            yield bugs.UNITS_NOT_FREED_BEFORE_THE_NEXT
        if surplus <= max(reductions, default=0):
            yield bugs.COPIED_BEFORE_IT_IS_FREED


def _sizes(calls: Sequence[Call], kinds: Collection[str], phase: Phase) -> list[int]:
    """Bytes of each collective of some kinds in a phase; of all phases, if it has none."""
    found = [call for call in calls if call.kind in kinds]
    return [call.bytes for call in found if call.phase == phase] or [one.bytes for one in found]


def _adds_up(total: int, sizes: Sequence[int]) -> bool:
    """Return True if a subset of the sizes adds up to the total."""
    sums = {0}
    for size in sizes:
        sums |= {one + size for one in sums if one + size <= total}
        if len(sums) > MOST_SUMS:
            return False
    return total in sums


MOST_SUMS = 1 << 16
"""Sums that are tried; with more of them any total is one."""
