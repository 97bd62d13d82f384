"""Loads of resumed cases, by world sizes and by what was done to the checkpoint."""

from __future__ import annotations

from hand_made import loaded, resumed

from zerocheck.protocol.verdicts import EQUIVALENCE, RESUME, Load
from zerocheck.run.records.loads import Loads, sum_loads
from zerocheck.run.records.tally import tally


def test_each_load_counts_where_its_ranks_stand() -> None:
    counted = tally(resumed())
    zero2, ddp = (counted.implementations[name].loads for name in ("zero2", "ddp"))
    assert zero2.pairs == {(3, 2): {"holds": 5}, (2, 5): {"holds": 1}}
    assert ddp.pairs == {
        (3, 2): {"holds": 3, "crashed": 1, "unsupported": 1},
        (2, 5): {"violated": 1, "known": 1, "hung": 1},
    }
    assert counted.loads.pairs[3, 2] == {"holds": 8, "crashed": 1, "unsupported": 1}
    assert (counted.loads.saved, counted.loads.loaded) == ([2, 3], [2, 5])


def test_what_only_tries_a_checkpoint_counts_apart() -> None:
    loads = tally(resumed()).loads
    assert loads.tried["killed"].verdicts == {"holds": 2, "crashed": 1}
    assert loads.tried["killed"].gave == {"new": 1, "older": 1}
    assert loads.tried["flip"].verdicts == {"holds": 1, "violated": 1}
    assert loads.tried["flip"].gave == {"none": 1, "wrong": 1}


def test_a_load_is_known_if_all_that_it_violates_is() -> None:
    both = Load(segment=1, violated=("roundtrip", "continuation"))
    for known, status in ((("roundtrip",), "violated"), (("roundtrip", "continuation"), "known")):
        loads = Loads()
        loads.add(loaded(0, both, known=known), RESUME)  # type: ignore[arg-type]
        assert loads.pairs == {(3, 2): {status: 1}}


def test_only_what_was_asked_for_counts() -> None:
    record = loaded(0, Load(segment=1), Load(segment=1, gave="new"), last={"killed": 0.5})
    for asked, pairs, tried in (
        (("durability",), 0, 1),
        (("damage", "export"), 0, 0),
        (("continuation",), 1, 0),
        (EQUIVALENCE, 0, 0),
    ):
        loads = Loads()
        loads.add(record, asked)
        assert (len(loads.pairs), len(loads.tried)) == (pairs, tried)


def test_a_broken_case_counts_for_the_load_it_did_not_come_past() -> None:
    for begun, pair in ((0, (3, 2)), (1, (3, 2)), (2, (2, 5))):
        loads = Loads()
        record = loaded(0, onto=(2, 5), status="crashed", judgement=None, begun=begun)
        loads.add(record, RESUME)
        assert loads.pairs == {pair: {"crashed": 1}}


def test_together_leaves_its_parts_alone() -> None:
    one, other = Loads(), Loads()
    one.add(loaded(0, Load(segment=1)), RESUME)
    other.add(loaded(0, Load(segment=1)), RESUME)
    assert sum_loads((one, other)).pairs == {(3, 2): {"holds": 2}}
    assert one.pairs == {(3, 2): {"holds": 1}}
