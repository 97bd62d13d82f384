"""Cases drawn at random: enough of them can be run, and more of them begin with the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from zerocheck.case.schema import Case
from zerocheck.errors import UsageError
from zerocheck.run.draws import MOST_DRAWN, at_random, enough
from zerocheck.run.options import RunOptions

OPTIONS = RunOptions(implementations=("ddp",), world_sizes=(1, 2, 3))


def some(count: int) -> list[Case]:
    return at_random(OPTIONS, count, {}, [(2, 2)])


def asking(refuses: Callable[[Case], str | None]) -> Callable[[Sequence[Case]], list[str | None]]:
    return lambda cases: [refuses(case) for case in cases]


@pytest.mark.parametrize("features", [(), ("clip", "microbatches")])
def test_more_cases_begin_with_the_same_ones(features: tuple[str, ...]) -> None:
    options = RunOptions(implementations=("ddp",), world_sizes=(1, 2, 3), features=features)
    draw_some = partial(at_random, options, fixed={}, meshes=[(2, 2)])
    assert draw_some(40)[:10] == draw_some(10)


def test_what_is_mostly_supported_has_the_cases_of_the_seed() -> None:
    cases = some(20)
    refused = set(cases[:10])
    assert enough(some, 20, asking(lambda case: "no" if case in refused else None)) == cases


def test_code_that_is_made_for_little_gets_cases_that_it_supports() -> None:
    def refuses(case: Case) -> str | None:
        if case.training.clip is None:
            return "always clips"
        return None if case.training.microbatches == 1 else "no accumulation"

    supported = [case for case in some(20) if refuses(case) is None]
    assert 0 < len(supported) < 10
    found = enough(some, 20, asking(refuses))
    assert len(found) == 20
    reasons = [refuses(case) for case in found]
    assert sorted(filter(None, reasons)) == ["always clips", "no accumulation"]
    assert [case for case in found if case in supported] == supported


def test_reasons_that_are_all_different_take_a_quarter() -> None:
    def refuses(case: Case) -> str | None:
        return None if case.data.batch == 1 else f"batches of {case.data.batch}, {hash(case)}"

    reasons = [refuses(case) for case in enough(some, 20, asking(refuses))]
    assert len(reasons) == 20 and reasons.count(None) == 15


def test_where_nothing_is_supported_each_reason_is_told_once() -> None:
    asked: list[int] = []

    def ask(cases: Sequence[Case]) -> list[str | None]:
        asked.append(len(cases))
        return [f"{case.world_size} ranks" for case in cases]

    found = enough(some, 20, ask)
    assert sorted(case.world_size for case in found) == [1, 2, 3, 4]
    assert max(asked) == 20 * MOST_DRAWN


def test_where_no_more_can_be_drawn_it_keeps_what_there_is() -> None:
    cases = some(8)

    def few(count: int) -> list[Case]:
        if count > 8:
            raise UsageError("the fixed fields leave only 8")
        return cases

    assert enough(few, 8, asking(lambda case: "no" if case != cases[3] else None)) == cases


def test_where_all_there_is_was_drawn_it_asks_no_more() -> None:
    cases = some(3)
    asked: list[int] = []

    def ask(of: Sequence[Case]) -> list[str | None]:
        asked.append(len(of))
        return ["no"] * len(of)

    assert enough(lambda count: cases, 8, ask) == cases
    assert asked == [3]
