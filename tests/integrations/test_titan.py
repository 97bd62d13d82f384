"""The integration with torchtitan, with a loop that has its names and takes its steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from borrowing import Ask, answers
from torch import nn

from zerocheck.errors import UsageError
from zerocheck.integrations.torchtitan import check
from zerocheck.ranks import Pool

sys.path.insert(0, os.path.dirname(__file__))


@pytest.fixture(scope="module")
def titan_pool() -> Iterator[Pool]:
    with Pool("titan_targets:run", patience_s=60.0) as pool:
        yield pool


@pytest.fixture
def titan(titan_pool: Pool, tmp_path: Path) -> Ask:
    """Train on so many ranks; what each returned."""

    def run(ranks: int, **given: Any) -> list[dict[str, Any]]:
        options = {"averages": False, "done": 0, "parts": 1, "optimizer": "AdamW"}
        options |= {"directory": str(tmp_path), **given}
        return answers(titan_pool, ranks, **options)

    return run


@pytest.mark.every(2)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_its_steps_hold(titan: Ask, ranks: int) -> None:
    for answer in titan(ranks):
        assert (answer["wrong"], answer["taken"]) == (0, 3), answer
        held = {name for name, status in answer["statuses"].items() if status == "holds"}
        assert held >= {"gradient", "clip", "update", "ownership"}


def test_gradients_that_are_averaged_once_more(titan: Ask) -> None:
    """Where division was not turned off, each is too small by the number of ranks."""
    answers = titan(2, averages=True)
    assert [one["wrong"] for one in answers] == [3, 3]
    assert "2 times too small" in answers[0]["message"], answers[0]["message"]


def test_a_resumed_training_goes_on_counting(titan: Ask) -> None:
    assert [one["taken"] for one in titan(2, done=40)] == [43, 43]


def test_each_part_of_a_model_is_checked(titan: Ask) -> None:
    """The norm is that over both."""
    for answer in titan(2, parts=2):
        assert (answer["wrong"], answer["parts"]) == (0, 2), answer
        assert answer["unjudged"]["clip"].endswith("parameters outside of the attached model")


def test_an_optimizer_that_is_not_judged(titan: Ask) -> None:
    """One sentence, and the training goes on without checks."""
    for rank, answer in enumerate(titan(2, optimizer="NAdam")):
        assert (answer["wrong"], answer["taken"], answer["statuses"]) == (0, 3, {})
        assert answer["message"].count("got NAdam") == (rank == 0), answer


def test_what_is_no_trainer() -> None:
    with pytest.raises(UsageError, match="check is given a Linear without train_step"):
        check(nn.Linear(2, 1))
    with pytest.raises(UsageError, match="did you mean 'reference'"):
        check(nn.Linear(2, 1), refrence=None)
