"""Covering arrays: counted again, by hand, from the cases."""

from __future__ import annotations

from fractions import Fraction
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerocheck.case import covering
from zerocheck.case.covering import ALONE, Pairs, candidates, cost, cover
from zerocheck.case.drawing import draw
from zerocheck.case.features import FEATURES, OF_AXIS, OF_OPTIMIZERS, OF_STEPS, features
from zerocheck.case.options import defaults
from zerocheck.case.schema import Case, Model

WORLDS = (1, 2, 3, 4, 5, 7, 8, 16)
PAIRS = Pairs(OF_STEPS)


@pytest.fixture(scope="module")
def pool() -> dict[Case, int]:
    """Candidates of the default world sizes."""
    return candidates(PAIRS, seed=0, world_sizes=WORLDS)


def by_hand(case: Case) -> set[tuple[str, str]]:
    """The pairs of a case, as the module says they count."""
    present = features(case)
    pairs = set(combinations(present, 2))
    return {pair for pair in pairs if ALONE in pair} if ALONE in present else pairs


def test_the_array_has_every_pair_of_the_candidates(pool: dict[Case, int]) -> None:
    cases, held = list(pool), list(pool.values())
    wanted = set().union(*map(by_hand, cases))
    bits = 0
    for some in held:
        bits |= some
    assert set(PAIRS.named(bits)) == wanted
    chosen = [cases[place] for place in cover(held, [cost(case) for case in cases], bits)]
    assert set().union(*map(by_hand, chosen)) == wanted
    assert len(chosen) == len(set(chosen)) <= 120
    # Few cases are slow ones.
    assert sum(case.world_size > 8 for case in chosen) <= 15


@pytest.mark.long
def test_the_candidates_have_every_pair_that_drawing_gives(pool: dict[Case, int]) -> None:
    """They were drawn until nothing new came; thousands of others bring nothing either."""
    known = set().union(*map(by_hand, pool))
    others = draw(6_000, seed=99, world_sizes=WORLDS)
    missed = set().union(*map(by_hand, others)) - known
    assert not missed
    assert len(known) > 2_500


@pytest.mark.long
def test_what_excludes_each_other_is_not_waited_for(pool: dict[Case, int]) -> None:
    known = set().union(*map(by_hand, pool))
    impossible = [
        ("world-2", "world-3"),
        ("stem-dense", "tied"),
        ("world-1", "uneven"),
        ("step-1", "step-2"),
    ]
    for one, other in impossible:
        assert not known & {(one, other), (other, one)}
    # Every feature is possible on its own, but for what is there for those who ask.
    drawn = set(OF_STEPS) - {"compile-inductor", "compute-fp16"}
    drawn -= set(chain(*OF_OPTIMIZERS.values())) - set(OF_OPTIMIZERS["adamw"])
    assert {name for pair in known for name in pair} == drawn - {*OF_AXIS["replicate"]}


def test_one_rank_exercises_its_own_pairs_only() -> None:
    alone, two = Case(mesh=(1,), model=Model(unused=True)), Case(model=Model(unused=True))
    assert {pair[0] for pair in PAIRS.named(PAIRS.of(alone))} == {"world-1"}
    assert ("stem-dense", "unused") in set(PAIRS.named(PAIRS.of(two)))
    assert ("stem-dense", "unused") not in set(PAIRS.named(PAIRS.of(alone)))


@pytest.mark.long
def test_the_same_arguments_give_the_same_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covering, "LEAST", 400)
    monkeypatch.setattr(covering, "QUIET", 200)
    first, again, other = (candidates(PAIRS, seed=seed, world_sizes=WORLDS) for seed in (0, 0, 1))
    assert len(first) > 300 and list(first.items()) == list(again.items())
    assert list(other) != list(first)


def test_fixed_fields_and_wanted_features_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covering, "LEAST", 400)
    monkeypatch.setattr(covering, "QUIET", 200)
    fixed = {"training": {"clip": None}, "start": {"step": 0, "moments": "zero"}}
    pool = candidates(PAIRS, seed=0, world_sizes=(2, 3), fixed=fixed, having=("unused",))
    assert len(pool) > 50
    for case in pool:
        assert case.training.clip is None and case.start.step == 0 and case.mesh in ((2,), (3,))
        assert "unused" in features(case)
    assert not candidates(
        PAIRS, seed=0, world_sizes=(2,), fixed={"model": {"stem": "dense"}}, having=("tied",)
    )


@given(st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)), st.integers(0, 11))
def test_pairs_against_combinations(present: set[int], left: set[int], one: int) -> None:
    names = [f"f{place}" for place in range(12)]
    pairs = Pairs(names)
    chosen = [names[place] for place in sorted(present)]
    bits = pairs.without(set(names) - set(chosen))
    assert list(pairs.named(bits)) == list(combinations(chosen, 2))
    kept = pairs.without(names[place] for place in left)
    expected = [
        pair for pair in combinations(chosen, 2) if not set(pair) & {names[i] for i in left}
    ]
    assert list(pairs.named(bits & kept)) == expected
    own = pairs.with_feature(names[one])
    assert list(pairs.named(bits & own)) == [
        pair for pair in combinations(chosen, 2) if names[one] in pair
    ]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, (1 << 20) - 1), st.integers(1, 9)), max_size=30))
def test_cover_takes_what_is_needed_and_no_more(given: list[tuple[int, int]]) -> None:
    held, costs = [some for some, _ in given], [price for _, price in given]
    wanted = 0b1011_1111_1111_1011_1111
    chosen = cover(held, costs, wanted)
    total = union(held) & wanted
    assert union([held[place] for place in chosen]) & wanted == total
    for place in chosen:
        others = [held[other] for other in chosen if other != place]
        assert union(others) & wanted != total, "one case is superfluous"
    left = wanted
    for number, place in enumerate(chosen):
        worth = {p: Fraction((held[p] & left).bit_count(), costs[p]) for p in chosen[number:]}
        assert worth[place] == max(worth.values()), "another brings more for its cost"
        left &= ~held[place]
    assert chosen == cover(held, costs, wanted)


def union(held: list[int]) -> int:
    """All bits."""
    bits = 0
    for some in held:
        bits |= some
    return bits


def test_of_two_that_bring_the_same_the_cheaper_is_taken() -> None:
    assert cover([0b111, 0b111, 0b1], [20, 5, 1], 0b111) == [1]
    assert cost(Case(mesh=(16,))) > 3 * cost(Case(mesh=(2,)))


def test_every_sharding_feature_names_its_field() -> None:
    """Otherwise it would count as exercised by an implementation that ignores the field."""
    fields = (*Case().sharding.__struct_fields__, *defaults())
    for feature in FEATURES.values():
        if feature.dimension == "sharding":
            assert feature.field in fields, feature.name
        elif feature.dimension != "resume":  # a kind of checkpoint is a field, which few obey
            assert feature.field is None, feature.name
