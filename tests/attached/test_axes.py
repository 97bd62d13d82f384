"""Axes of a mesh that split sequences or experts: right code holds, wrong code is violated."""

from __future__ import annotations

from typing import Any

import pytest
from asking import Ask, held

WRAPS = ("ddp", "fsdp2", "fsdp1")
SEQUENCE, EXPERTS = {"cp": 2}, {"ep": 2}
BOTH = {"cp": 2, "ep": 2}


def asked(ask: Ask, sizes: dict[str, int], **given: Any) -> dict[str, Any]:
    ranks = 1
    for size in sizes.values():
        ranks *= size
    return ask("axes", ranks=ranks, sizes=sizes, **given)[0]


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_parts_of_a_sequence(ask: Ask, wrap: str, order: str) -> None:
    answer = asked(ask, SEQUENCE, wrap=wrap, order=order)
    assert "gradient" in held(answer) and answer["unjudged"] == {}, answer
    assert "all hold" in answer["summary"]


def test_a_sequence_over_ranks_with_samples_of_their_own(ask: Ask) -> None:
    """Two microbatches of each."""
    answer = asked(ask, {"dp": 2, "cp": 2}, wrap="ddp")
    assert "gradient" in held(answer) and answer["unjudged"] == {}, answer


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", ["stacked", "listed"])
def test_experts(ask: Ask, wrap: str, kind: str) -> None:
    answer = asked(ask, EXPERTS, wrap=wrap, kind=kind)
    assert "gradient" in held(answer) and answer["unjudged"] == {}, answer


@pytest.mark.parametrize("kind", ["stacked", "listed"])
def test_both_at_once(ask: Ask, kind: str) -> None:
    """Each expert has two copies, which must stay equal."""
    answer = asked(ask, BOTH, kind=kind)
    assert {"gradient", "publish"} <= held(answer) and answer["unjudged"] == {}, answer


@pytest.mark.parametrize(
    ("sizes", "given", "words"),
    [
        (SEQUENCE, {"fault": "cut"}, "attention.qkv.weight has no gradient"),
        (SEQUENCE, {"fault": "positions"}, "is not what the declared semantics say"),
        (SEQUENCE, {"fault": "undeclared order", "order": "zigzag"}, "parts are put together in"),
        (
            EXPERTS,
            {"fault": "undivided", "kind": "stacked"},
            "the wrapper of the model reduces none",
        ),
        (
            EXPERTS,
            {"fault": "undivided", "kind": "listed"},
            "the wrapper of the model reduces none",
        ),
        (EXPERTS, {"fault": "cut", "kind": "stacked"}, "moe.weight has no gradient"),
        (EXPERTS, {"fault": "another expert", "kind": "stacked"}, ""),
        (EXPERTS, {"fault": "another expert", "kind": "listed"}, ""),
        (BOTH, {"fault": "copies apart", "kind": "stacked"}, "cp, an axis of the mesh, has 2 ra"),
        (BOTH, {"fault": "over the others", "kind": "stacked"}, "cp or ep, axes of the mesh"),
    ],
)
def test_what_is_wrong_is_violated(
    ask: Ask, sizes: dict[str, int], given: dict[str, Any], words: str
) -> None:
    answer = asked(ask, sizes, **given)
    assert "gradient: " in answer["summary"] and words in answer["summary"], answer


def test_other_names_are_declared(ask: Ask) -> None:
    answer = asked(ask, {"context": 2}, declared={"context": "sequence"}, wrap="ddp")
    assert "gradient" in held(answer), answer


@pytest.mark.parametrize(
    ("sizes", "declared", "words"),
    [
        ({"foo": 2}, {}, "what the mesh dimension 'foo' splits is not known from its name"),
        ({"cp": 2}, {"pc": "sequence"}, "unknown mesh dimension 'pc'; did you mean 'cp'?"),
        ({"cp": 2}, {"cp": "sequences"}, "did you mean 'sequence'?"),
        ({"cp": 2, "sp": 2}, {}, "cp and sp split sequence (allowed: one axis)"),
    ],
)
def test_unknown_axes(
    ask: Ask, sizes: dict[str, int], declared: dict[str, str], words: str
) -> None:
    answer = asked(ask, sizes, declared=declared, wrap="ddp")
    assert answer["raised"] == "UsageError" and words in answer["said"], answer


def test_dropout_in_parts_of_a_sequence(ask: Ask) -> None:
    """One device draws other numbers for a whole sequence than ranks do for its parts."""
    answer = asked(ask, SEQUENCE, fault="dropout")
    assert answer["statuses"]["gradient"] != "holds"
    assert answer["unjudged"]["gradient"].startswith("the model draws random numbers")


def test_a_reference_of_one_part_is_refused(ask: Ask) -> None:
    """It has the shapes of the rank's own experts, and not those of all."""
    answer = asked(ask, EXPERTS, kind="stacked", fault="reference of a part")
    assert answer["raised"] == "UsageError"
    assert "moe.weight differs between ranks, and reference= has one of the same" in answer["said"]


def test_a_reference_that_exchanges_is_refused(ask: Ask) -> None:
    """The others of its axis would never call it."""
    answer = asked(ask, SEQUENCE, fault="reference that exchanges")
    assert "the model of reference= calls" in answer["summary"], answer
    assert "it must be the model that one device runs, on whole sequences" in answer["summary"]


MULTIPLIED = "and in a reduction of its own: it multiplies every gradient by 0.37"


@pytest.mark.parametrize(
    ("sizes", "kind", "wrap"),
    [
        (EXPERTS, "stacked", "ddp"),
        (EXPERTS, "listed", "fsdp2"),
        ({"dp": 2}, "", "none"),
        (SEQUENCE, "", "none"),  # over the ranks among which the model exchanges, too
    ],
)
def test_a_factor_after_a_reduction_of_the_script(
    ask: Ask, sizes: dict[str, int], kind: str, wrap: str
) -> None:
    """Where that reduction ends is not seen; a clip by hand is said, and no violation."""
    answer = asked(ask, sizes, kind=kind, wrap=wrap, clipped="by hand")
    assert "gradient" in held(answer)
    assert answer["unjudged"]["gradient"].endswith(MULTIPLIED)


def test_a_factor_hides_no_other_one(ask: Ask) -> None:
    answer = asked(ask, EXPERTS, kind="stacked", clipped="by hand", fault="undivided")
    assert "gradient: " in answer["summary"] and "2 of them wrong" in answer["summary"]


def test_lists_that_are_clipped_by_their_joint_norm(ask: Ask) -> None:
    answer = asked(ask, EXPERTS, kind="stacked", wrap="ddp", clipped="joint")
    assert {"clip", "gradient"} <= held(answer) and answer["unjudged"] == {}, answer
    answer = asked(ask, EXPERTS, kind="stacked", wrap="ddp", clipped="twice")
    assert "clip: the reported norm" in answer["summary"], answer


def test_what_the_script_reduces_is_shown_as_the_optimizer_gets_it(ask: Ask) -> None:
    """Both points are wrong: at the first one the script has not reduced it yet."""
    answer = asked(ask, BOTH, kind="stacked", wrap="ddp", fault="divided twice")
    assert "gradient is 4 times too small" in answer["summary"], answer


def test_what_an_axis_replicates_and_does_not_reduce(ask: Ask) -> None:
    """Its parts of the gradient, added up or averaged, are right."""
    answer = asked(ask, {"dp": 2, "cp": 2}, wrap="fsdp2", fault="reduced over dp alone")
    assert "cp, an axis of the mesh, has 2 ranks, and the gradient is not" in answer["summary"]
    assert "publish" not in answer["unjudged"], answer


def test_copies_that_differ_before_the_step(ask: Ask) -> None:
    """The meshes say that they are copies, so no gradient of them can be right."""
    answer = asked(ask, BOTH, kind="stacked", fault="copies made apart")
    assert "publish: before the step, copies of parameter differ" in answer["summary"], answer
    assert answer["unjudged"]["gradient"] == "copies of parameters differed before the step"


def test_an_exchange_that_cuts_the_graph(ask: Ask) -> None:
    """The forward is right, and gradients before the exchange lack what others have of them."""
    answer = asked(ask, SEQUENCE, fault="half a graph")
    assert "so that its forward is right, and its backward is not" in answer["summary"], answer


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "all hold (ownership, gradient, update, publish, buffers)"),
        ({"fault": "bias"}, "tp, an axis of the mesh, has 2 ranks, and the gradient is not"),
        ({"fault": "averaged"}, "2 times too small: tp, an axis of the mesh"),
        ({"fault": "bias", "first": 3}, "the gradient that the optimizer was given differs"),
        ({"fault": "counts"}, "buffers: bias was equal on all ranks before the step; the script"),
        ({"fault": "counts", "first": 3}, "buffers: bias differs between ranks before the step"),
    ],
)
def test_what_ranks_of_tensor_parallelism_gather_by_hand(
    ask: Ask, given: dict[str, Any], words: str
) -> None:
    """In a first step, and in one that begins with what an earlier one left."""
    answer = ask("gathered", ranks=4, **given)[0]
    assert words in answer["summary"], answer
