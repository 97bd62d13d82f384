"""The precision of drawn cases: by the seed, where the model can have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

from msgspec.structs import replace

from zerocheck.case.drawing import draw
from zerocheck.case.features import OF_PRECISION, features
from zerocheck.case.precision import drawn
from zerocheck.case.reductions import simpler
from zerocheck.case.schema import Block, Case, Model, Precision

NARROW = Model(blocks=(Block(kind="mlp", dtype="bf16"),))


def test_three_of_24_seeds() -> None:
    counted = Counter(drawn(seed, Model()) for seed in range(24))
    assert counted == {
        Precision(): 21,
        Precision(compute="bf16", reduce="fp32"): 1,
        Precision(compute="bf16", reduce="bf16"): 1,
        Precision(compute="fp32", reduce="bf16"): 1,
    }
    assert {drawn(seed, NARROW) for seed in range(24)} == {Precision()}


def test_all_other_choices_stay_and_what_is_fixed_is_not_drawn() -> None:
    def cases(**fixed: str) -> list[Case]:
        return draw(100, seed=3, world_sizes=(2, 3), fixed={"precision": fixed})

    own = draw(100, seed=3, world_sizes=(2, 3))
    plain = cases(compute="fp32", reduce="fp32")
    assert [replace(case, precision=Precision()) for case in own] == plain
    assert any(case.precision != Precision() for case in own)
    assert {case.precision.reduce for case in cases(reduce="bf16")} == {"bf16"}


def test_each_feature_of_it_is_drawn_and_goes_when_a_case_is_made_smaller() -> None:
    found = set().union(*(features(case) for case in draw(400, seed=1, world_sizes=(2,))))
    assert found >= OF_PRECISION - {"compute-fp16"}
    case = Case(precision=Precision(compute="bf16", reduce="bf16"))
    search = simpler(case)
    tried = [next(search)]
    while tried[-1].precision != Precision():
        tried.append(search.send(False))
    # What fails only with a narrow reduction keeps that alone.
    assert _shrunk(simpler(case)) == Precision(reduce="bf16")


def _shrunk(search: Generator[Case, bool, Case]) -> Precision:
    smaller = next(search)
    while True:
        try:
            smaller = search.send(smaller.precision.reduce == "bf16")
        except StopIteration as stop:
            found: Case = stop.value
            return found.precision
