"""Stages of a pipeline: right ones hold; what is wrong in one, or between two, is violated."""

from __future__ import annotations

from typing import Any

import pytest
from asking import Ask, held

PP = {"pp": 2}
WITH_SAMPLES = {"pp": 2, "dp": 2}


def asked(ask: Ask, schedule: str, sizes: dict[str, int], **given: Any) -> dict[str, Any]:
    ranks = 1
    for size in sizes.values():
        ranks *= size
    return ask("stages", ranks=ranks, sizes=sizes, schedule=schedule, **given)[0]


def assert_right(answer: dict[str, Any]) -> None:
    assert answer["unjudged"] == {} and "gradient" in held(answer), answer["unjudged"]
    assert "wrong" not in answer["summary"] and "not judged" not in answer["summary"], answer


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "v"])
def test_schedules(ask: Ask, schedule: str) -> None:
    assert_right(asked(ask, schedule, WITH_SAMPLES, wrap="fsdp2"))


def test_zero_bubble_without_a_wrapper(ask: Ask) -> None:
    """Parameters are edges of the model's own tensors there."""
    assert_right(asked(ask, "zero-bubble", PP))


@pytest.mark.parametrize("names", ["", "named"])
def test_ddp(ask: Ask, names: str) -> None:
    """Names of parameters that stages share get the number of the stage."""
    assert_right(asked(ask, "1f1b", WITH_SAMPLES, wrap="ddp", names=names))


def test_a_reference_that_is_the_whole_model(ask: Ask) -> None:
    assert_right(asked(ask, "1f1b", PP, names="whole"))
    answer = asked(ask, "1f1b", PP, names="whole", fault="divided twice")
    assert "gradient is 4 times too small" in answer["summary"], answer


@pytest.mark.parametrize("names", ["", "whole"])
def test_a_weight_that_two_stages_share(ask: Ask, names: str) -> None:
    """The reference says that it is tied only if it is the whole model."""
    assert_right(asked(ask, "1f1b", PP, names=names, fault="tied"))
    answer = asked(ask, "1f1b", PP, names=names, fault="tied, not summed")
    if names:
        assert "1.weight is not the sum of its own and that of 5.weight" in answer["summary"]
    else:
        assert_right(answer)


def test_the_ranks_of_a_stage_alone(ask: Ask) -> None:
    """Stages are not compared then, and each is judged by itself."""
    assert_right(asked(ask, "1f1b", WITH_SAMPLES, wrap="fsdp2", declared=False))


def test_tensor_parallelism_inside_of_stages(ask: Ask) -> None:
    """Ranks have parts of the sequence between the stages, as DTensor's SequenceParallel gives."""
    answer = asked(ask, "1f1b", {"pp": 2, "tp": 2})
    assert_right(answer)
    answer = asked(ask, "1f1b", {"pp": 2, "tp": 2}, fault="norm in parts")
    assert "differs between ranks that hold the same" in answer["summary"], answer


def test_losses_that_are_summed(ask: Ask) -> None:
    """The schedule divides nothing then, and that is no violation."""
    assert_right(asked(ask, "1f1b", PP, fault="losses are summed"))


def test_the_norm_is_that_over_all_stages(ask: Ask) -> None:
    answer = asked(ask, "1f1b", WITH_SAMPLES, wrap="fsdp2", clipped=True)
    assert {"clip", "gradient"} <= held(answer), answer
    answer = asked(ask, "1f1b", WITH_SAMPLES, wrap="fsdp2", clipped=True, fault="norm of a stage")
    assert "it is the norm without those of stage 1" in answer["summary"], answer


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("divided twice", "gradient is 4 times too small"),
        ("activations of another microbatch", "stage 1 was called with what stage 0 did not"),
        ("gradients scaled on the way", "stage 0 got gradients that stage 1 did not send back"),
    ],
)
def test_what_is_wrong_is_violated(ask: Ask, fault: str, words: str) -> None:
    answer = asked(ask, "1f1b", PP, fault=fault)
    assert words in answer["summary"], answer


def test_stages_in_fsdp1_need_other_names(ask: Ask) -> None:
    answer = asked(ask, "1f1b", WITH_SAMPLES, wrap="fsdp1")
    assert answer["raised"] == "UsageError" and "names that differ" in answer["said"], answer


def test_a_gradient_that_is_not_cleared(ask: Ask) -> None:
    """The schedule divides what was left by the microbatches once more, between two backwards."""
    answer = asked(ask, "interleaved", PP, fault="not cleared")
    assert "the gradient of the step before is in the gradient of every" in answer["summary"]


def test_stages_by_hand(ask: Ask) -> None:
    assert_right(ask("stages_by_hand")[0])
    answer = ask("stages_by_hand", fault="a microbatch is dropped")[0]
    assert "stage 0 and stage 1 computed 1 and 2 microbatches" in answer["summary"], answer
    answer = ask("stages_by_hand", fault="a buffer is used again")[0]
    assert "in stage 1 the inputs of 1 of 2 microbatches were overwritten" in answer["summary"]


@pytest.mark.parametrize("average", ["mean", "sum"])
def test_a_model_that_takes_and_returns_dtensors(ask: Ask, average: str) -> None:
    """Ranks with the same samples have all of their gradient, which a sum has once."""
    answer = ask("tensor_parallel", average=average)[0]
    assert answer["unjudged"] == {} and "gradient" in held(answer), answer
