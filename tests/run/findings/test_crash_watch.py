"""When the cases of an implementation crash alike."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from hand_made import case

from zerocheck.protocol.verdicts import Status
from zerocheck.run.findings.crash_watch import ALIKE, CrashWatch
from zerocheck.run.records.records import CaseFinished


def crash(number: int = 0, name: str = "zero2", **fields: object) -> CaseFinished:
    record = case(number, name, "crashed")
    values = {"error": "NameError", "place": "build (a.py:5)", "title": f"in case {number}"}
    return msgspec.structs.replace(record, **{**values, **fields})


def noticed(records: Iterator[CaseFinished] | list[CaseFinished]) -> list[bool]:
    watch = CrashWatch()
    return [watch.add(record) for record in records]


def test_alike_is_one_error_at_one_line() -> None:
    assert noticed([crash(number) for number in range(5)]) == [False, False, True, False, False]
    assert ALIKE == 3


@pytest.mark.parametrize(
    "other",
    [
        {"place": "build (a.py:6)"},
        {"error": "TypeError"},
        {"status": "hung"},
        {"known": ("gradient",)},
    ],
)
def test_what_differs_ends_it(other: dict[str, object]) -> None:
    records = [crash(), crash(**other), *(crash(number) for number in range(5))]
    assert not any(noticed(records))


@pytest.mark.parametrize("status", ["holds", "violated"])
def test_a_case_that_is_judged_ends_it(status: Status) -> None:
    for place in (0, 1):
        records = [crash(number) for number in range(5)]
        assert not any(noticed([*records[:place], case(9, "zero2", status), *records[place:]]))


def test_unsupported_cases_and_other_implementations_do_not_count() -> None:
    refused, other = case(9, "zero2", "unsupported"), case(9, "ddp")
    records = [refused, crash(), other, crash(), refused, crash()]
    assert noticed(records) == [False] * 5 + [True]


def test_without_code_of_the_user_the_message_decides() -> None:
    assert not any(noticed([crash(number, place="") for number in range(4)]))
    assert noticed([crash(number, place="", title="no file") for number in range(3)])[-1]
