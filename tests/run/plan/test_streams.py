"""Enough of the cases that are drawn can be run, whatever the code under test refuses, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerocheck.case.schema import Case
from zerocheck.errors import UsageError
from zerocheck.run.plan.draws import at_random
from zerocheck.run.plan.options import RunOptions
from zerocheck.run.plan.streams import MOST_DRAWN, MOST_GIVEN, Asking, Stream

OPTIONS = RunOptions(implementations=("ddp",), world_sizes=(1, 2, 3))
Refuses = Callable[[Case], str | None]


def some(count: int) -> list[Case]:
    return at_random(OPTIONS, count, {}, [(2, 2)])


def asking(refuses: Refuses) -> Asking:
    return lambda cases: [refuses(case) for case in cases]


def nothing(cases: Sequence[Case]) -> list[str | None]:
    return [None] * len(cases)


def narrow(case: Case) -> str | None:
    if case.training.clip is None:
        return "always clips"
    return None if case.training.microbatches == 1 else "no accumulation"


def test_what_is_mostly_supported_has_the_cases_of_the_seed() -> None:
    cases = some(20)
    refused = set(cases[:10])
    stream = Stream(some, 20, asking(lambda case: "no" if case in refused else None))
    assert stream.cases == cases and stream.more() == []


def test_code_that_is_made_for_little_gets_cases_that_it_supports() -> None:
    supported = [case for case in some(20) if narrow(case) is None]
    assert 0 < len(supported) < 10
    found = Stream(some, 20, asking(narrow)).cases
    assert len(found) == 20
    reasons = [narrow(case) for case in found]
    assert sorted(filter(None, reasons)) == ["always clips", "no accumulation"]
    assert [case for case in found if case in supported] == supported


def test_reasons_that_are_all_different_take_a_quarter() -> None:
    def refuses(case: Case) -> str | None:
        return None if case.data.batch == 1 else f"batches of {case.data.batch}, {hash(case)}"

    reasons = [refuses(case) for case in Stream(some, 20, asking(refuses)).cases]
    assert len(reasons) == 20 and reasons.count(None) == 15


def test_where_nothing_is_supported_each_reason_is_told_once() -> None:
    asked: list[int] = []

    def ask(cases: Sequence[Case]) -> list[str | None]:
        asked.append(len(cases))
        return [f"{case.world_size} ranks" for case in cases]

    found = Stream(some, 20, ask).cases
    assert sorted(case.world_size for case in found) == [1, 2, 3, 4]
    assert max(asked) == 20 * MOST_DRAWN


def test_where_no_more_can_be_drawn_it_keeps_what_there_is() -> None:
    cases = some(8)

    def few(count: int) -> list[Case]:
        if count > 8:
            raise UsageError("the fixed fields leave only 8")
        return cases

    ask = asking(lambda case: "no" if case != cases[3] else None)
    assert Stream(few, 8, ask).cases == cases


def test_where_all_there_is_was_drawn_it_asks_no_more() -> None:
    cases = some(3)
    asked: list[int] = []

    def ask(of: Sequence[Case]) -> list[str | None]:
        asked.append(len(of))
        return ["no"] * len(of)

    assert Stream(lambda count: cases, 8, ask).cases == cases
    assert asked == [3]


def built(stream: Stream, refuses: Refuses) -> list[list[Case]]:
    """Build all that it gives, as a run does: what was given each time."""
    given = [stream.cases]
    while given[-1]:
        for case in given[-1]:
            if refuses(case) is not None:
                stream.note(case)
        given.append(stream.more())
    return given[:-1]


def test_what_is_refused_while_it_is_built_has_others_in_its_place() -> None:
    first, *later = built(Stream(some, 20, nothing), narrow)
    assert first == some(20)
    every = [case for cases in (first, *later) for case in cases]
    assert later and len(set(every)) == len(every) <= 20 * MOST_GIVEN
    assert sum(narrow(case) is None for case in every) >= 10
    assert sum(narrow(case) is None for case in every[: -len(later[-1])]) < 10


def test_others_are_no_more_than_a_run_can_take() -> None:
    every = built(Stream(some, 5, nothing), lambda case: "no")
    assert [len(cases) for cases in every] == [5] * MOST_GIVEN


def test_others_are_asked_of_first() -> None:
    def ask(cases: Sequence[Case]) -> list[str | None]:
        return ["odd" if case.world_size == 3 else None for case in cases]

    _, *later = built(Stream(some, 20, ask), narrow)
    assert later and not any(case.world_size == 3 for cases in later for case in cases)


def test_cases_of_others_do_not_count() -> None:
    stream = Stream(some, 4, nothing)
    for case in some(40)[4:]:
        stream.note(case)
    assert stream.more() == []
