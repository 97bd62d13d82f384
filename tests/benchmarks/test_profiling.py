"""Timers of the benchmarks, which no other test runs, are still around what there is."""

from __future__ import annotations

import pytest
from benchmarks.profiling import JUDGE_PARTS, RANK_PARTS, judge_timed


@pytest.mark.parametrize(
    ("owner", "attribute"), [(owner, name) for owner, name, _ in (*RANK_PARTS, *JUDGE_PARTS)]
)
def test_what_is_timed_is_there(owner: object, attribute: str) -> None:
    assert callable(getattr(owner, attribute))


def test_the_judge_is_timed_and_left_as_it_was() -> None:
    before = [getattr(owner, name) for owner, name, _ in JUDGE_PARTS]
    with judge_timed() as seconds:
        assert seconds == {}
        assert all(
            getattr(owner, name) is not function
            for (owner, name, _), function in zip(JUDGE_PARTS, before, strict=True)
        )
    assert [getattr(owner, name) for owner, name, _ in JUDGE_PARTS] == before
