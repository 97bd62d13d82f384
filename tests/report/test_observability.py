"""What a run says of the placement that it observed, and of what it could not see."""

from __future__ import annotations

from collections import Counter

from zerocheck.report.sections import observability_lines, placement
from zerocheck.run.records.tally import ImplementationTally, Tally

KINDS = ("parameters", "gradients", "optimizer states")


def tallied(**fields: object) -> ImplementationTally:
    return ImplementationTally("mine.py:build", {}, **fields)  # type: ignore[arg-type]


def test_shares_of_the_most_ranks_are_said() -> None:
    shares = {"parameters": [1.0, 1.0], "gradients": [0.34, 1.0], "optimizer states": [0.34, 0.5]}
    one = tallied(placement={2: {kind: [0.5] for kind in KINDS}, 3: shares})
    assert placement(one) == [
        "on 3 ranks parameters replicated, gradients sharded (a rank holds 34 %) in 1 of 2 cases, "
        "optimizer states sharded (a rank holds 34 to 50 %)"
    ]


def test_nothing_sharded_is_a_warning_unless_it_is_declared() -> None:
    whole = {2: {kind: [1.0] for kind in KINDS}}
    (_, warning) = placement(tallied(placement=whole))
    assert warning.startswith("nothing is sharded")
    assert len(placement(tallied(placement=whole, stage=0))) == 1
    assert placement(tallied()) == []


def test_hidden_states_are_said_with_what_to_add() -> None:
    counted = Tally()
    counted.implementations["mine.py:build"] = tallied(tiers=Counter({"parameters only": 3}))
    (line,) = observability_lines(counted)
    assert line.startswith("mine.py:build: the optimizer shows no states in 3 cases")
    assert "Built(states=...)" in line
