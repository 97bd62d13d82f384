"""Exchanges beyond those of a wrapper, and what each rank has of its own: not judged, by name."""

from __future__ import annotations

import pytest
from asking import Ask, held

NOT_KNOWN = "pass the device mesh as mesh=, and a model that does not use it as reference="


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "fsdp1"])
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("all_to_all", "all_to_all in the forward"),
        ("detached", "all_to_all in the forward"),
        ("functional", "all_gather_tensor_autograd in the forward"),
        ("backward", "allreduce in the backward"),
    ],
)
def test_an_exchange_is_not_judged(ask: Ask, wrap: str, kind: str, call: str) -> None:
    """Right and wrong ones alike; the rest of the step is."""
    for answer in ask("exchanging", wrap=wrap, kind=kind):
        assert {"update", "publish"} - held(answer) <= {"publish"}, answer
        assert answer["statuses"]["gradient"] != "holds"
        reason = answer["unjudged"]["gradient"]
        assert reason.startswith(f"the script calls {call} (exchange_scenarios.py:"), reason
        assert reason.endswith(NOT_KNOWN) and reason in answer["summary"]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "fsdp1", "hybrid_fsdp2"])
@pytest.mark.parametrize("kind", ["", "metric", "outside"])
def test_what_is_no_exchange_is_judged(ask: Ask, wrap: str, kind: str) -> None:
    """A number without a gradient, and what is outside of forward and backward."""
    ranks = 4 if wrap == "hybrid_fsdp2" else 2
    for answer in ask("exchanging", ranks=ranks, wrap=wrap, kind=kind):
        assert "gradient" in held(answer) and answer["unjudged"] == {}, answer


def test_a_hook_of_ddp_is_no_exchange(ask: Ask) -> None:
    for answer in ask("exchanging", wrap="own_hooked", kind=""):
        assert "gradient" in held(answer), answer


OWN = "2.weight differs between ranks, and the wrapper of the model does not keep it equal"


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_what_differs_by_design_is_named(ask: Ask, wrap: str) -> None:
    """The gradients of the others are judged."""
    for answer in ask("experts", wrap=wrap):
        assert {"update", "gradient", "publish"} <= held(answer)
        assert answer["unjudged"]["publish"].startswith(OWN)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("fault", "name"), [("own", "2.weight"), ("other", "0.bias")])
def test_its_update_is_judged(ask: Ask, wrap: str, fault: str, name: str) -> None:
    for answer in ask("experts", wrap=wrap, fault=fault):
        tensors = [one["tensors"] for one in answer["violations"]]
        assert [name] in tensors, answer


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_what_is_left_out_and_equal_is_judged(ask: Ask, wrap: str) -> None:
    """Nothing reduces its gradient, which is a bug then, seen in the first step."""
    summary = ask("experts", wrap=wrap, own=False)[0]["summary"]
    assert "2 of 2 steps checked, 1 of them wrong" in summary, summary
    assert "from step 1: gradient: " in summary
