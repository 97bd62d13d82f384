"""Obligation: each rank calls the collectives that its layout says, and all ranks call the same.

There is no tolerance: kinds, bytes, dtypes and sizes of groups are compared one by one, in the
order in which they are called, and with the layout their phases too. Messages between two ranks
(send, recv) differ from rank to rank, and are compared with the layout alone, as are the bytes of
an all-to-all. Stages of a pipeline call collectives of their own.

How much is sent in units of Psi is a figure for reports: see `paper`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ... import causes as bugs
from ...case.schema import Case
from ...protocol.layout import Call, Layout
from ...protocol.measurements import Measured
from ...protocol.verdicts import Violation, merge_violations
from ..diagnose.communication import causes
from ..obligation import Checked, Measurements, ObligationCheck


def check(case: Case, measured: Sequence[Measured]) -> Checked:
    """Check the calls of all steps, between ranks and against the prediction."""
    called = any(calls for one in measured for calls in one.calls)
    found: dict[tuple[object, ...], Violation] = {}
    for number in range(max((len(one.calls) for one in measured), default=0)):
        step = case.training.first + number
        observed = [one.calls[number] if number < len(one.calls) else () for one in measured]
        violation = _apart(case, observed, step) or _unlike_layout(case, measured, observed, step)
        if violation is not None:
            found.setdefault((violation.role, violation.causes, violation.ranks), violation)
    steps = any(one.steps for one in measured)
    return Checked(
        violation=merge_violations(list(found.values())),
        exercised=steps,
        vacuous=case.world_size == 1 or not called,
    )


def volume(calls: Sequence[Call]) -> float:
    """Bytes that a rank sends by ring algorithms.

    For each call (n - 1) / n of its tensor over n ranks, and twice that for an all-reduce.
    """
    return sum(
        (2 if call.kind == "all_reduce" else 1) * call.bytes * (call.ranks - 1) / call.ranks
        for call in calls
        if call.ranks > 1
    )


def predicted(layout: Layout, step: int) -> tuple[Call, ...]:
    """Return the predicted calls of one step; steps after the last predicted one repeat it."""
    at = min(step, layout.last)
    return tuple(call for call in layout.calls or () if call.step in (at, -1))


def _apart(case: Case, observed: Sequence[Sequence[Call]], step: int) -> Violation | None:
    """Find the first call in which a rank differs from the first rank of its stage."""
    moved = [[call for call in calls if call.kind not in ("send", "recv")] for calls in observed]
    stages = [case.axes.coordinate(rank, "pp") for rank in range(len(moved))]
    for rank, calls in enumerate(moved):
        peer = stages.index(stages[rank])
        first = moved[peer]
        place = _first_difference([_among(one) for one in first], [_among(one) for one in calls])
        if place is None:
            continue
        here, there = _at(calls, place), _at(first, place)
        at = here or there
        assert at is not None
        return Violation(
            obligation="communication",
            step=step,
            role=at.kind,
            tensors=(),
            ranks=(peer, rank),
            observed=float(here.bytes if here else 0),
            expected=float(there.bytes if there else 0),
            bound=0.0,
            explanation=(
                f"in the {at.phase} of step {step}, rank {rank} calls {_words(here)} as collective "
                f"{place + 1} of the step, and rank {peer} {_words(there)}"
            ),
            wrong=len(calls),
            total=len(first),
            causes=(bugs.RANKS_CALL_OTHER_COLLECTIVES,),
        )
    return None


def _unlike_layout(
    case: Case, measured: Sequence[Measured], observed: Sequence[Sequence[Call]], step: int
) -> Violation | None:
    """Find the first call that is not the predicted one, on all ranks where this is so."""
    predicted = [_predicted(one, step) for one in measured]
    wrong = [
        rank
        for rank, (calls, says) in enumerate(zip(observed, predicted, strict=True))
        if says is not None and [_place(one) for one in calls] != [_place(one) for one in says]
    ]
    if not wrong:
        return None
    rank = wrong[0]
    calls, says = observed[rank], predicted[rank]
    assert says is not None
    place = _first_difference([_place(one) for one in says], [_place(one) for one in calls])
    assert place is not None
    here, there = _at(calls, place), _at(says, place)
    at = here or there
    assert at is not None
    return Violation(
        obligation="communication",
        step=step,
        role=at.kind,
        tensors=(),
        ranks=tuple(wrong),
        observed=volume(calls),
        expected=volume(says),
        bound=0.0,
        explanation=(
            f"in the {at.phase} of step {step}, rank {rank} calls {_words(here)} as collective "
            f"{place + 1} of the step, where its layout has {_words(there)}; in all "
            f"{_sum(calls)}, where it has {_sum(says)}"
        ),
        wrong=len(calls),
        total=len(says),
        causes=causes(case, calls, says, frozen=_before_unfreezing(case, measured[rank], step)),
    )


def _before_unfreezing(case: Case, measured: Measured, step: int) -> tuple[Call, ...] | None:
    """Return the calls predicted for the last step before unfreezing, in a later step."""
    unfreeze = case.training.unfreeze
    if unfreeze is None or step < unfreeze:
        return None
    return _predicted(measured, unfreeze - 1)


def _predicted(measured: Measured, step: int) -> tuple[Call, ...] | None:
    if measured.layout is None or measured.layout.calls is None:
        return None
    return predicted(measured.layout, step)


def _among(call: Call) -> tuple[object, ...]:
    """Return what is the same on all ranks of a call."""
    return call.kind, 0 if call.kind == "all_to_all" else call.bytes, call.ranks, call.dtype


def _place(call: Call) -> tuple[object, ...]:
    return call.kind, call.bytes, call.ranks, call.dtype, call.phase


def _first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    for place in range(max(len(one), len(other))):
        if one[place : place + 1] != other[place : place + 1]:
            return place
    return None


def _at(calls: Sequence[Call], place: int) -> Call | None:
    return calls[place] if place < len(calls) else None


def _words(call: Call | None) -> str:
    if call is None:
        return "nothing"
    return (
        f"{call.kind} of {call.bytes:,} bytes ({call.dtype or 'no tensor'}) over {call.ranks} ranks"
    )


def _sum(calls: Sequence[Call]) -> str:
    few = f"{len(calls)} collectives that send" if len(calls) != 1 else "1 collective that sends"
    return f"{few} {volume(calls):,.0f} bytes"


def _check_case(measurements: Measurements) -> Iterator[Checked]:
    yield check(measurements.case, measurements.ranks)


COMMUNICATION = ObligationCheck("communication", _check_case)
