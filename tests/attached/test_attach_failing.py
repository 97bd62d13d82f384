"""The check never ends a training: where it fails, on one rank too, it says so and stops."""

from __future__ import annotations

import pytest
from asking import Ask, held
from failing_scenarios import PLACES

BUNDLE = "bundle"


@pytest.mark.every(3)
@pytest.mark.parametrize("place", [one for one in PLACES if one != BUNDLE])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_ours_ends_the_checks_alone(ask: Ask, place: str, rank: int) -> None:
    if place == "all ranks" and rank == 1:
        rank = 0  # rank 0 alone judges what all reported
    answers = ask("failing", place=place, on=[rank])
    for answer in answers:
        assert answer["equal"] and answer["raised"] == "" and answer["next"] == -1, answer
    for number in {0, rank}:
        message = answers[number]["message"]
        assert message.count("No step is checked from here on; the training goes on") == 1, message
        assert "ZeroDivisionError: planted" in message and f"rank {rank}" in message


@pytest.mark.parametrize("wrap", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("place", ["before", "clip", "in the backward", "sums"])
def test_however_it_is_sharded(ask: Ask, wrap: str, place: str) -> None:
    """FSDP2 reports a norm that is reduced by a collective of all ranks."""
    for answer in ask("failing", place=place, on=[1], wrap=wrap):
        assert answer["equal"] and answer["next"] == -1, answer


@pytest.mark.parametrize("on_violation", ["raise", "warn"])
def test_a_bundle_that_cannot_be_written_hides_no_violation(ask: Ask, on_violation: str) -> None:
    answers = ask("failing", place=BUNDLE, on=[1], on_violation=on_violation)
    for answer in answers:
        raised = "untouched" in answer["raised"] or "step 2: update" in answer["raised"]
        assert raised is (on_violation == "raise"), answer
    assert "VIOLATED DDP with AdamW" in answers[0]["message"]
    assert "cannot be kept for `zerocheck replay`: ZeroDivisionError" in answers[0]["message"]


def test_both_ranks_can_fail(ask: Ask) -> None:
    for answer in ask("failing", place="backward", on=[0, 1]):
        assert answer["equal"] and answer["next"] == -1


def test_a_step_that_one_rank_leaves_is_not_judged(ask: Ask) -> None:
    """The script goes on after its own error, and so do the checks."""
    answers = ask("swallowed")
    for answer in answers:
        assert "update" in held(answer)
    for number, there in ((1, True), (2, False), (3, True), (4, True)):
        assert (f"zerocheck: step {number}: ownership" in answers[0]["message"]) is there


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("names", "only one of them has the parameter layer"),
        ("shapes", "layer.weight has the shape [3, 6] and [4, 6]"),
        ("stages", "stages [0] and [1] of a pipeline"),
    ],
)
def test_ranks_with_different_models_are_not_checked(ask: Ask, kind: str, message: str) -> None:
    answers = ask("different", kind=kind)
    assert not any(answer["checked"] for answer in answers)
    assert message in answers[0]["message"] and "the stages of a pipeline" in answers[0]["message"]
    assert answers[0]["message"].count("zerocheck:") == 1 and not answers[1]["message"]
    assert "update" in held(answers[1]["stage"])


def test_other_values_under_the_same_names_are_a_violation(ask: Ask) -> None:
    """Nothing tells stages of a home-made pipeline from parameters that were never broadcast."""
    message = ask("different", kind="values")[0]["message"]
    assert "VIOLATED one process with AdamW: the gradient" in message and "publish" in message
    assert "as in a pipeline, pass mesh=" in " ".join(message.split())
