"""With reference= gradients are judged: right ones hold, however sharded; wrong ones are named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import Ask, held
from click.testing import CliRunner
from torch import nn

import zerocheck
from zerocheck.adapters.shared.compiling import COMPILERS
from zerocheck.cli import main


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "given",
    [
        {"wrap": "ddp"},
        {"wrap": "ddp", "ranks": 3},
        {"wrap": "ddp", "scales": True},
        {"wrap": "ddp", "autocast": True},
        {"wrap": "ddp", "factory": "random_net"},
        {"wrap": "compiled_ddp"},
        {"wrap": "compiled_whole"},
        {"wrap": "fp16_hooked", "ranks": 3},
        {"wrap": "fp16_wrapped", "ranks": 3},
        {"wrap": "own_hooked"},
        {"wrap": "fsdp1"},
        {"wrap": "flat_fsdp1"},
        {"wrap": "fsdp2", "factory": "random_net"},
        {"wrap": "hybrid_fsdp2", "ranks": 4},
        {"wrap": "narrow_fsdp2", "factory": "random_net"},
        {"wrap": "narrow_fsdp2", "ranks": 3},
        {"wrap": "narrow_fsdp2", "autocast": True},
        {"wrap": "bf16_fsdp2"},
        {"wrap": "reduced_fsdp2", "ranks": 3},
        {"wrap": "narrow_fsdp1"},
        {"wrap": "narrow_fsdp1", "autocast": True},
        {"wrap": "narrow_fsdp1", "factory": "buffered_net"},
        {"wrap": "narrow_fsdp2", "factory": "buffered_net"},
        {"wrap": "flat_fsdp1", "factory": "buffered_net"},
    ],
    ids=str,
)
def test_what_is_right_holds(ask: Ask, given: dict[str, Any]) -> None:
    for answer in ask("referenced", **given):
        assert {"gradient", "ownership", "update"} <= held(answer)
        assert answer["tier"] == "full" and answer["share"]["gradient"] < 1


@pytest.mark.parametrize("alike", [False, True])
def test_the_same_samples_on_all_ranks_are_said(ask: Ask, alike: bool) -> None:
    """Every gradient is right, and the ranks learn what one of them would alone."""
    answer, other = ask("referenced", wrap="fsdp2", alike=alike)
    assert "all hold" in answer["summary"] and "all hold" in other["summary"]
    words = "all ranks computed with the same samples in 2 of them"
    assert (words in answer["summary"]) == (words in other["summary"]) == alike


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"wrap": "ddp", "fault": "world", "ranks": 3}, "gradient x W"),
        ({"wrap": "fsdp2", "fault": "world", "ranks": 3}, "gradient x W"),
        ({"wrap": "flat_fsdp1", "fault": "world", "ranks": 3}, "gradient x W"),
        ({"wrap": "ddp", "fault": "world", "ranks": 3, "autocast": True}, "gradient x W"),
        ({"wrap": "narrow_fsdp2", "fault": "world", "ranks": 3}, "gradient x W"),
        ({"wrap": "narrow_fsdp1", "fault": "world"}, "gradient x W"),
        ({"wrap": "bf16_fsdp2", "fault": "cleared", "ranks": 3}, "last microbatch only"),
        ({"wrap": "reduced_fsdp2", "fault": "world"}, "gradient x W"),
        ({"wrap": "fp16_hooked", "fault": "world", "ranks": 3}, "gradient x W"),
        ({"wrap": "fp16_wrapped", "fault": "world", "ranks": 3}, "gradient x W"),
        ({"wrap": "ddp", "fault": "local"}, "local gradient only"),
        ({"wrap": "ddp", "fault": "cleared", "ranks": 3}, "last microbatch only"),
        ({"wrap": "fsdp2", "fault": "cleared", "ranks": 3}, "last microbatch only"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(ask: Ask, given: dict[str, Any], cause: str) -> None:
    for answer in ask("referenced", **given):
        found = {one["obligation"]: one for one in answer["violations"]}
        assert cause in found["gradient"]["causes"], answer
        assert answer["tier"] == "full"


@pytest.mark.parametrize("given", [{"wrap": "narrow_fsdp2"}, {"wrap": "ddp", "autocast": True}])
def test_a_short_gradient_is_found_in_bf16(ask: Ask, given: dict[str, Any]) -> None:
    """No element of it is out of its bound: it is the length that says it."""
    for answer in ask("referenced", fault="short", factory="deep_net", ranks=3, **given):
        found = {one["obligation"]: one for one in answer["violations"]}
        assert found["gradient"]["causes"] == ["gradient scaled"], answer


@pytest.mark.parametrize("wrap", ["fsdp2", "narrow_fsdp2"])
def test_a_bundle_is_judged_again_with_the_model(ask: Ask, tmp_path: Path, wrap: str) -> None:
    """Each rank's shards, inputs, casts and random state are in it."""
    given = {"wrap": wrap, "fault": "world", "factory": "random_net", "ranks": 3}
    ask("referenced", **given)
    bundle = str(tmp_path / "kept" / "step-2")
    model = f"{Path(__file__).parent / 'scenarios.py'}:random_net"
    done = CliRunner().invoke(main, ["replay", bundle, "--model", model])
    assert done.exit_code == 1, done.output
    assert "  cause       gradient x W" in done.output
    assert "reproduced: the same verdict on step 2" in done.output
    done = CliRunner().invoke(main, ["replay", bundle])
    assert done.exit_code == 0, done.output
    assert "its gradient was not judged again: it needs --model" in done.output


@pytest.mark.long
@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("own", [False, True])
def test_random_numbers_of_inductor(tmp_path: Path, own: bool) -> None:
    """Its dropout masks are not torch's, unless it is told so."""

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 2))

    model = make_model()
    model.compile(dynamic=False, options={"fallback_random": not own})
    optimizer = torch.optim.AdamW(model.parameters())
    check = zerocheck.attach(model, optimizer, reference=make_model, directory=tmp_path)
    with check.step():
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    assert check.last is not None and "update" in held_by(check)
    assert ("gradient" in held_by(check)) is not own
    assert ("inductor draws random numbers" in check.last.unjudged.get("gradient", "")) is own


def held_by(check: zerocheck.Attached) -> set[str]:
    assert check.last is not None
    return {name for name, status in check.last.statuses.items() if status == "holds"}


@pytest.mark.parametrize("wrap", ["power_sgd", "wrapped_power_sgd"])
def test_what_a_hook_approximates_is_not_judged(ask: Ask, wrap: str) -> None:
    for answer in ask("referenced", wrap=wrap):
        assert answer["tier"] == "state only" and "update" in held(answer)
        assert answer["unjudged"]["gradient"].startswith("powerSGD_hook, a communication hook of")


def test_casts_of_a_part_of_the_model_are_not_judged(ask: Ask) -> None:
    for answer in ask("referenced", wrap="partly_narrow_fsdp2"):
        assert answer["tier"] == "state only" and "update" in held(answer)
        message = "FSDP computes in another dtype than the parameters have, "
        assert answer["unjudged"]["gradient"].startswith(message)


def test_buffers_of_which_some_are_cast_are_not_judged(ask: Ask) -> None:
    for answer in ask("referenced", wrap="ignoring_fsdp1", factory="buffered_net"):
        assert answer["tier"] == "state only" and "update" in held(answer)
        assert answer["unjudged"]["gradient"].endswith(
            "leaves out buffers of modules that it ignores"
        )


def test_gradients_of_before_the_step_are_not_judged(ask: Ask) -> None:
    for answer in ask("referenced", stale=True):
        assert answer["tier"] == "state only" and "update" in held(answer)
        assert [*answer["unjudged"]] == ["gradient"] and not answer["estimated"]
        assert "zero_grad() missing" in answer["unjudged"]["gradient"]


@pytest.mark.parametrize(
    ("beside", "wrap"),
    [
        ("weights", "ddp"),
        ("weights", "fsdp1"),
        ("weights", "fsdp2"),
        ("inner", "ddp"),
        ("inner", "flat_fsdp1"),
        ("inner", "fsdp2"),
    ],
)
def test_a_loss_that_goes_past_the_outputs_is_not_judged(ask: Ask, beside: str, wrap: str) -> None:
    """The reference does not see such a term: what it gives is not the gradient of the run."""
    message = {"weights": "past the outputs of the model", "inner": "not among its outputs"}[beside]
    for answer in ask("referenced", wrap=wrap, beside=beside):
        assert answer["tier"] == "state only" and "update" in held(answer)
        assert message in answer["unjudged"]["gradient"], answer


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "compiled_ddp"])
def test_what_a_loss_has_of_its_own_is_no_other_way(ask: Ask, wrap: str) -> None:
    for answer in ask("referenced", wrap=wrap, beside="others"):
        assert {"gradient", "update"} <= held(answer) and answer["unjudged"] == {}
        assert answer["estimated"] == ["gradient"]


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("other_names", "has no parameter '0.weight'; did you mean 'layer.0.weight'?"),
        ("trained_net", "0.weight of the model of reference= is the parameter that is trained"),
        ("broken", "raised FileNotFoundError: no weights on this machine"),
    ],
)
def test_a_reference_that_does_not_fit(ask: Ask, factory: str, message: str) -> None:
    """All ranks stop the checks, though it goes wrong on one, and the training goes on."""
    answers = ask("referenced", factory=factory)
    for answer in answers:
        assert answer["last"] is None and answer["taken"] == 2, answer
    assert message in answers[0]["message"]
    assert "No step is checked from here on" in answers[0]["message"]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "fsdp1"])
def test_a_reference_with_other_outputs_is_named(ask: Ask, wrap: str) -> None:
    """The gradient is that of another model; whose fault it is, the outputs do not say."""
    answer, *_ = ask("referenced", factory="other_net", wrap=wrap)
    assert answer["violations"][0]["obligation"] == "gradient"
    said = "the output of the model in microbatch 0 is not that of reference= for the same inputs"
    assert said in answer["summary"], answer
