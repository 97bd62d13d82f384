"""Ranks on hosts: the short form and back, how it is drawn, and how it gets smaller."""

from __future__ import annotations

from itertools import product

import pytest
from msgspec.structs import replace

from zerocheck.case.codec import decode, encode
from zerocheck.case.drawing import draw
from zerocheck.case.features import features
from zerocheck.case.reductions import left, simpler
from zerocheck.case.schema import Case, Training
from zerocheck.errors import UsageError
from zerocheck.machine.hosts import Hosts, RankPlace, counts, drawn, places, spelled
from zerocheck.run.findings.extent import extent, size


@pytest.mark.parametrize(
    ("hosts", "world_size", "expected"),
    [
        ((), 3, (3,)),
        ((2,), 3, (2, 1)),
        ((2,), 4, (2, 2)),
        ((1,), 3, (1, 1, 1)),
        ((1, 2), 6, (1, 2, 2, 1)),
        ((4,), 3, (3,)),
    ],
)
def test_numbers_on_each_host(hosts: Hosts, world_size: int, expected: tuple[int, ...]) -> None:
    assert counts(hosts, world_size) == expected


def test_places_number_the_ranks_of_each_host() -> None:
    assert places((2,), 3) == (RankPlace(0, 0, 2), RankPlace(0, 1, 2), RankPlace(1, 0, 1))
    assert places((), 2) == (RankPlace(0, 0, 2), RankPlace(0, 1, 2))


def test_the_short_form_says_the_same() -> None:
    for number in (1, 2, 3, 4):
        for on_each in product((1, 2, 3), repeat=number):
            form = spelled(on_each)
            assert counts(form, sum(on_each)) == on_each
            assert len(form) <= number and (form == ()) == (number == 1)
    assert spelled((2, 2, 2)) == (2,) and spelled((2, 2, 1)) == (2,) and spelled((1, 2)) == (1, 2)


def test_a_quarter_of_the_seeds_has_several_hosts_of_all_kinds() -> None:
    several = [drawn(seed, 5) for seed in range(1200) if drawn(seed, 5)]
    assert len(several) == 300
    assert set(several) == {(3,), (1,), (1, 4)}
    assert {drawn(seed, 2) for seed in range(12)} == {(), (1,)}
    assert {drawn(seed, 1) for seed in range(12)} == {()}
    cases = draw(200, seed=0, world_sizes=(3,))
    assert 20 < sum("hosts" in features(case) for case in cases) < 80
    fixed = draw(50, seed=0, world_sizes=(3,), fixed={"hosts": [2]})
    assert {case.hosts for case in fixed} == {(2,)}


def test_features() -> None:
    def answer(hosts: Hosts, world_size: int) -> set[str]:
        return {f for f in features(Case(mesh=(world_size,), hosts=hosts)) if "hosts" in f}

    assert answer((), 4) == answer((4,), 4) == set()
    assert answer((2,), 4) == {"hosts"}
    assert answer((2,), 3) == {"hosts", "hosts-uneven"}


def test_they_stand_in_the_file_of_a_case() -> None:
    case = Case(mesh=(3,), hosts=(2,))
    assert decode(encode(case), source="it") == case
    assert decode(b'{"mesh": [3]}', source="it").hosts == ()
    with pytest.raises(UsageError, match="hosts"):
        decode(b'{"mesh": [3], "hosts": [0]}', source="it")


@pytest.mark.parametrize("hosts", [(2,), (1, 3), (1,), (3, 1)])
def test_a_fault_of_several_hosts_ends_at_two_of_one_rank(hosts: Hosts) -> None:
    case = replace(draw(5, seed=1, world_sizes=(5,))[4], hosts=hosts)
    search = simpler(case)
    candidate = next(search)
    try:
        while True:
            candidate = search.send("hosts" in features(candidate))
    except StopIteration as end:
        smallest = end.value
    assert smallest == Case(mesh=(2,), hosts=(1,), seed=case.seed, training=Training(steps=1))
    assert [path for path, _ in left(smallest)] == ["hosts"]
    assert size(smallest) == "2 ranks on 2 hosts, no blocks, 1 step"
    assert extent(smallest, left(smallest), None) == "only with several hosts"
