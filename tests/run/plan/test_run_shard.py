"""Shards of a run: each case is of one of them."""

from __future__ import annotations

import pytest

from zerocheck.case.resume import draw_resumed
from zerocheck.case.schema import Case
from zerocheck.errors import UsageError
from zerocheck.run.plan.run_shard import RunShard, cost

CASES = [
    *(Case(mesh=(1 + number % 8,), seed=number) for number in range(100)),
    *draw_resumed(20, seed=0, world_sizes=(1, 2, 3, 8)),
]


@pytest.mark.parametrize("count", [1, 2, 8, 150])
def test_each_case_is_of_one_shard(count: int) -> None:
    taken = [index for number in range(1, count + 1) for index in RunShard(number, count).of(CASES)]
    assert sorted(taken) == list(range(len(CASES)))


def test_shards_cost_the_same() -> None:
    loads = [
        sum(cost(CASES[index]) for index in RunShard(number, 8).of(CASES)) for number in range(1, 9)
    ]
    assert max(loads) - min(loads) <= 1


def test_a_shard_is_the_same_on_each_machine() -> None:
    assert RunShard(2, 3).of(CASES) == RunShard.parse("2/3").of(list(CASES))
    assert str(RunShard.parse(" 2/3 ")) == "2/3"


@pytest.mark.parametrize(
    "text",
    ["", "3", "0/8", "9/8", "-1/8", "1/0", "1.0/2", "1/2/3", "a/b", "1 / 2", "1/1001", "٣/٨"],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"such as 3/8 \(allowed: 1/1 to 1000/1000"):
        RunShard.parse(text)
