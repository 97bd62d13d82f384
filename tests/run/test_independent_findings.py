"""Which violations of one case are findings of their own."""

from __future__ import annotations

import pytest

from zerocheck.judge.verdict import Obligation, Violation
from zerocheck.run.findings import independent


def violation(obligation: Obligation, step: int = 0, *causes: str, mild: bool = False) -> Violation:
    return Violation(
        obligation=obligation,
        step=step,
        role="parameter",
        tensors=(),
        ranks=(),
        explanation="wrong",
        causes=causes,
        mild=mild,
    )


def told(*violations: Violation) -> list[str]:
    return [one.obligation for one in independent(violations)]


@pytest.mark.parametrize(
    ("first", "then"),
    [("gradient", "publish"), ("loss", "gradient"), ("update", "publish"), ("publish", "loss")],
)
def test_what_follows_is_no_finding(first: Obligation, then: Obligation) -> None:
    assert told(violation(then, 1), violation(first, 0)) == [first]


def test_what_is_mild_leads_to_nothing() -> None:
    assert told(violation("clip", 0, mild=True), violation("publish", 1)) == ["clip", "publish"]


def test_ranks_with_gradients_of_their_own_skip_steps_of_their_own() -> None:
    disagree = violation("update", 1, "ranks disagree")
    assert told(violation("gradient"), violation("publish"), disagree) == ["gradient"]
    assert told(disagree) == ["update"]
    assert told(violation("gradient", 2), disagree) == ["update", "gradient"]
    # Another wrong update is one of its own.
    assert told(violation("gradient"), violation("update", 1)) == ["gradient", "update"]
