"""What is said of the most that ranks hold within a step, from figures written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from zerocheck.case.schema import Case, Training
from zerocheck.judge.obligations import peak
from zerocheck.protocol.layout import Call, Highest, Layout, Peak, Phase, Term
from zerocheck.protocol.measurements import Measured
from zerocheck.protocol.verdicts import Violation

CASE = Case(mesh=(2,), training=Training(steps=3))
"""Steps 1 and 2 are alike."""
CALLS = tuple(
    Call(kind, size, 2, "float32", phase)
    for kind, size, phase in (
        ("all_gather", 40, "forward"),
        ("all_gather", 64, "forward"),
        ("all_gather", 100, "forward"),
        ("reduce_scatter", 64, "backward"),
        ("reduce_scatter", 100, "backward"),
        ("reduce_scatter", 48, "backward"),
    )
)
TOLD: dict[Term, int] = {"gathered": 104, "bucket": 164, "working": 500}


def layout(answer: dict[Term, int] = TOLD, steps: int = 1) -> Layout:
    highest = tuple(
        Highest(phase, step, term, size)
        for step in range(steps)
        for phase in ("forward", "backward")
        for term, size in answer.items()
    )
    return Layout(lines=(), calls=CALLS, last=steps - 1, highest=highest)


def rank(
    held: dict[tuple[int, Phase], dict[Term, int]] | None = None,
    says: Layout | None = None,
    steps: int = 3,
) -> Measured:
    """Holds what is told, and something else where it is given."""
    peaks = [
        Peak(phase, step, {"gathered": 1}, {**TOLD, **(held or {}).get((step, phase), {})})
        for step in range(steps)
        for phase in ("forward", "backward")
    ]
    return Measured(peaks=tuple(peaks), layout=says or layout(), calls=(CALLS,) * 3, steps=3)


def in_each(phase: Phase, **held: int) -> dict[tuple[int, Phase], dict[Term, int]]:
    return {(step, phase): {**held} for step in range(3)}  # type: ignore[dict-item]


def violated(*ranks: Measured) -> Violation:
    violation = peak.check(CASE, ranks).violation
    assert violation is not None
    return violation


def test_as_much_as_is_told_and_less_hold() -> None:
    less = rank(in_each("forward", gathered=10, bucket=0, working=499))
    checked = peak.check(CASE, [rank(), less])
    assert checked.exercised and checked.violation is None and not checked.vacuous


@pytest.mark.parametrize("term", ["gathered", "bucket", "working"])
def test_one_byte_is_too_much(term: str) -> None:
    violation = violated(rank(), rank(in_each("backward", **{term: TOLD[term] + 1})))  # type: ignore[index]
    assert (violation.obligation, violation.role, violation.ranks) == ("peak", term, (1,))
    assert (violation.step, violation.observed, violation.bound) == (1, TOLD[term] + 1, 0)  # type: ignore[index]
    assert "in the backward of step 1 rank 1 holds" in violation.explanation
    assert "1 more than" in violation.explanation


@pytest.mark.parametrize("steps", [(0,), (1,), (2,), (0, 1)])
def test_what_does_not_show_in_every_step_that_is_alike_is_a_threads(steps: Sequence[int]) -> None:
    held: dict[tuple[int, Phase], dict[Term, int]] = {
        (step, "forward"): {"gathered": 999} for step in steps
    }
    assert peak.check(CASE, [rank(held), rank()]).violation is None


def test_the_least_excess_of_the_steps_is_told() -> None:
    held: dict[tuple[int, Phase], dict[Term, int]] = {
        (1, "forward"): {"bucket": 300}, (2, "forward"): {"bucket": 228},
    }  # fmt: skip
    violation = violated(rank(held), rank())
    assert (violation.step, violation.observed, violation.expected) == (2, 228, 164)


def test_the_sum_is_blamed_last() -> None:
    one = rank(in_each("forward", working=600))
    other = rank({**in_each("forward", working=600), **in_each("backward", gathered=204)})
    violation = violated(one, other)
    assert (violation.role, violation.ranks) == ("gathered", (1,))
    assert violated(one, one).ranks == (0, 1)


def test_each_step_is_compared_with_what_is_told_of_it() -> None:
    later = layout(steps=2)
    more = tuple(
        Highest(one.phase, one.step, one.term, one.bytes + 7 * one.step)
        for one in later.highest or ()
    )
    says = Layout(lines=(), calls=CALLS, last=1, highest=more)
    held = in_each("forward", gathered=111)
    assert peak.check(CASE, [rank(held, says)] * 2).violation is None
    assert violated(rank(in_each("forward", gathered=112), says)).expected == 111


def test_what_is_not_told_is_not_compared() -> None:
    says = layout({"gathered": 104})
    held = in_each("forward", bucket=10**6, working=10**6)
    assert peak.check(CASE, [rank(held, says)] * 2).violation is None
    silent = Layout(lines=(), calls=CALLS, last=0)
    assert peak.check(CASE, [rank(held, silent)] * 2).vacuous
    checked = peak.check(CASE, [Measured(), Measured()])
    assert (checked.exercised, checked.violation, checked.vacuous) == (False, None, True)
    assert peak.check(Case(), [rank(), rank()]).vacuous == (Case().world_size == 1)


@pytest.mark.parametrize(
    ("term", "more", "names"),
    [
        ("gathered", 64, {"a gathered unit twice", "units not freed before the next"}),
        ("gathered", 104, {"a gathered unit twice", "units not freed before the next"}),
        ("gathered", 164, {"units not freed before the next"}),
        ("gathered", 65, set()),
        ("bucket", 48, {"a bucket twice", "whole gradients kept within the step"}),
        ("bucket", 148, {"whole gradients kept within the step"}),
        ("bucket", 49, set()),
        ("working", 40, {"a gathered unit twice", "copied before it is freed"}),
        ("working", 100, {"a gathered unit twice", "copied before it is freed"}),
        ("working", 99, {"copied before it is freed"}),
        ("working", 140, {"units not freed before the next"}),
        ("working", 101, set()),
    ],
)
def test_causes_are_named_by_sizes(term: Term, more: int, names: set[str]) -> None:
    violation = violated(rank(in_each("forward", **{term: TOLD[term] + more})), rank())
    assert set(violation.causes) == names
