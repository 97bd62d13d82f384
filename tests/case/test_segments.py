"""The segments of a resumed case, and how resumed cases are drawn."""

from __future__ import annotations

from collections import Counter

import pytest

from zerocheck.case.codec import decode, encode
from zerocheck.case.features import FEATURES, features
from zerocheck.case.resume import draw_resumed
from zerocheck.case.schema import Case, Data, Training, TrainingSegment
from zerocheck.case.segments import end_of, is_one_forward, samples_before, segments_of
from zerocheck.case.validity import check
from zerocheck.errors import UsageError

TWO = Case(
    mesh=(4,),
    data=Data(batch=3),
    training=Training(steps=2, microbatches=2),
    resume=(TrainingSegment(mesh=(3,), steps=2, background=True), TrainingSegment(mesh=(1,))),
)


def test_segments_follow_each_other() -> None:
    first, second, third = segments_of(TWO)
    assert first is TWO
    assert [segment.mesh for segment in (first, second, third)] == [(4,), (3,), (1,)]
    assert [
        (segment.training.first, segment.training.steps) for segment in (first, second, third)
    ] == [(0, 2), (2, 4), (4, 5)]
    assert [len(segment.resume) for segment in (first, second, third)] == [2, 1, 0]


def test_a_step_more_is_taken_while_a_checkpoint_is_written() -> None:
    assert [end_of(segment) for segment in segments_of(TWO)] == [3, 4, 5]


def test_a_case_of_several_steps_ends_in_a_forward() -> None:
    several, one = (Case(training=Training(steps=steps)) for steps in (2, 1))
    assert [is_one_forward(several, index) for index in range(3)] == [False, False, True]
    assert not any(is_one_forward(one, index) for index in range(2))
    assert not any(is_one_forward(part, end_of(part)) for part in segments_of(TWO))


def test_samples_are_those_of_the_steps_that_count() -> None:
    assert [samples_before(TWO, number) for number in range(3)] == [0, 48, 84]


def test_a_case_without_checkpoints_is_its_only_segment() -> None:
    assert segments_of(Case()) == [Case()] and end_of(Case()) == Case().training.steps


def test_resumed_cases_round_trip_through_json() -> None:
    assert decode(encode(TWO), source="here") == TWO


def test_drawn_ones_are_valid_distinct_and_the_same_again() -> None:
    cases = draw_resumed(60, seed=1, world_sizes=(1, 2, 3, 5))
    assert cases == draw_resumed(60, seed=1, world_sizes=(1, 2, 3, 5))
    assert len(set(cases)) == 60
    for case in cases:
        check(case)
        assert case.resume and case.training.unfreeze is None


def pairs(cases: list[Case]) -> list[tuple[int, int]]:
    return [(case.world_size, case.resume[0].mesh[0]) for case in cases]


def test_every_pair_of_world_sizes_has_its_turn() -> None:
    cases = draw_resumed(32, seed=2, world_sizes=(1, 2, 3, 5))
    wanted = Counter({(a, b): 2 for a in (1, 2, 3, 5) for b in (1, 2, 3, 5)})
    assert Counter(pairs(cases)) == wanted
    assert set(pairs(cases[:16])) == set(wanted)


def test_a_few_cases_have_every_world_size_and_mostly_few_ranks() -> None:
    sizes = tuple(range(1, 17))
    found = pairs(draw_resumed(64, seed=2, world_sizes=sizes))
    assert len(set(found)) == 64
    assert {a for a, _ in found[:16]} == {b for _, b in found[:16]} == set(sizes)
    ranks = [a + b for a, b in found[16:]]
    # Drawn evenly the mean is 17. By weight it is 11.6; 30 other seeds gave 10.3 to 12.8.
    assert sum(ranks) / len(ranks) < 14


def test_harms_are_as_frequent_as_asked() -> None:
    some = [case.resume[-1] for case in draw_resumed(16, seed=4, world_sizes=(2, 3))]
    assert sum(segment.killed is not None for segment in some) == 2
    damages = [segment.damage for segment in some if segment.damage != "none"]
    assert damages == ["flip", "mix", "truncate", "mix"]
    killed = draw_resumed(9, seed=4, world_sizes=(2, 3), harms=("killed",))
    assert all(case.resume[-1].killed is not None for case in killed)
    both = draw_resumed(10, seed=4, world_sizes=(2, 3), harms=("killed", "damaged"))
    assert sum(case.resume[-1].damage != "none" for case in both) == 5


def test_one_world_size_is_enough() -> None:
    cases = draw_resumed(5, seed=1, world_sizes=(2,))
    assert [(case.mesh, case.resume[0].mesh) for case in cases] == [((2,), (2,))] * 5


def test_every_kind_of_segment_is_drawn() -> None:
    drawn = {
        name
        for case in draw_resumed(300, seed=3, world_sizes=(1, 2, 3, 16), into=("zero1", "zero3"))
        for name in features(case)
        if name.startswith("resume")
    }
    assert drawn == {name for name in FEATURES if name.startswith("resume")}


def test_asked_for_features_are_had() -> None:
    for case in draw_resumed(5, seed=0, world_sizes=(2, 3), having=("resume-twice", "clip")):
        assert {"resume-twice", "clip"} <= set(features(case))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case(training=Training(first=2)), "training.first is 2; allowed: 0 to"),
        (
            Case(resume=(TrainingSegment(killed=0.5), TrainingSegment())),
            "allowed: in the last segment",
        ),
        (Case(resume=(TrainingSegment(killed=0.5, damage="flip"),)), "allowed: one of them"),
        (Case(resume=(TrainingSegment(into="zero4"),)), "zero4"),
        (Case(resume=(TrainingSegment(mesh=(1024, 2)),)), "at most 1024"),
    ],
)
def test_impossible_ones_are_refused(case: Case, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(case)
