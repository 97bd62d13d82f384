"""Every obligation of a step and of a measurement is registered once, behind one interface."""

from __future__ import annotations

from typing import get_args

import pytest

from zerocheck.judge.obligation import Checked, ObligationCheck
from zerocheck.judge.obligations import OF_A_MEASUREMENT, OF_A_STEP
from zerocheck.judge.verdicts import Verdicts
from zerocheck.protocol.observations import Point, RankObservation
from zerocheck.protocol.verdicts import EQUIVALENCE, MEMORY, TITLES, Violation

ALL: tuple[ObligationCheck, ...] = (*OF_A_STEP, *OF_A_MEASUREMENT)


def test_each_is_there_once() -> None:
    """Ownership is judged where shards are put together, and not in a step."""
    assert sorted(one.name for one in OF_A_STEP) == sorted({*EQUIVALENCE} - {"ownership"})
    assert [one.name for one in OF_A_MEASUREMENT] == [*MEMORY]


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_each_says_what_it_is(one: ObligationCheck) -> None:
    assert one.title == TITLES[one.name]
    assert one.needs <= set(get_args(Point))


def test_a_violation_names_its_own_obligation() -> None:
    """A wrong loss may be a stale parameter: then `publish` is violated, and `loss` not judged."""
    verdicts = Verdicts([RankObservation()])
    stale = Violation(
        obligation="publish", step=1, role="parameter", tensors=(), ranks=(0,), explanation="stale"
    )
    verdicts.add("loss", Checked(violation=stale))
    verdicts.add("gradient", Checked(0.5))
    verdicts.add("gradient", Checked(0.25))
    assert verdicts.violations == {"publish": stale}
    assert verdicts.exercised == {"publish", "gradient"}
    assert verdicts.shares == {"gradient": 0.5}
