"""What a script does to gradients after their reduction is said; the reduction is judged."""

from __future__ import annotations

from pathlib import Path

import pytest
from asking import Ask, held
from click.testing import CliRunner

from zerocheck.attached.checks.script_changes import REPORTED
from zerocheck.cli import main

WRAPS = ["ddp", "fsdp2", "fsdp1"]
WORDS = {
    "quarter": "it multiplies every gradient by 0.25",
    "adaptive": "it multiplies every tensor by a factor for each tensor",
    "limited": "it changes elements of ",
    "noisy": "it changes elements of every tensor",
    "removed": "it removes 3.bias",
}


@pytest.mark.every(3)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("change", WORDS)
def test_a_change_is_said_and_the_rest_holds(ask: Ask, wrap: str, change: str) -> None:
    for answer in ask("changed", wrap=wrap, change=change):
        assert {"gradient", "update"} <= held(answer)
        reason = answer["unjudged"]["gradient"]
        assert reason.startswith(f"{REPORTED}: {WORDS[change]}"), reason
        assert answer["summary"].count(REPORTED) == 1


@pytest.mark.parametrize("wrap", [*WRAPS, "flat_fsdp1", "hybrid_fsdp2"])
def test_nothing_is_said_without_a_change(ask: Ask, wrap: str) -> None:
    ranks = 4 if wrap == "hybrid_fsdp2" else 2
    for answer in ask("changed", ranks=ranks, wrap=wrap, change="nothing"):
        assert "gradient" in held(answer) and answer["unjudged"] == {}, answer


@pytest.mark.parametrize("given", [{"scales": True}, {"clips": True}, {"alone": False}], ids=str)
def test_a_loss_scale_and_a_clip_are_no_change(ask: Ask, given: dict[str, bool]) -> None:
    for change, words in (("nothing", ""), ("quarter", WORDS["quarter"])):
        for answer in ask("changed", wrap="ddp", change=change, **given):
            assert {"gradient", "update"} <= held(answer)
            assert words in answer["unjudged"].get("gradient", "") and answer["unjudged"] == (
                {} if not words else {"gradient": f"{REPORTED}: {words}"}
            )
            assert ("clip" in held(answer)) is ("clips" in given)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
@pytest.mark.parametrize("change", ["quarter", "noisy", "limited"])
def test_a_wrong_reduction_is_found_before_the_change(
    ask: Ask, tmp_path: Path, wrap: str, change: str
) -> None:
    """It is judged where it ends, in a replay of its bundle too."""
    for answer in ask("changed", ranks=3, wrap=wrap, change=change, fault=True):
        causes = {one["obligation"]: one["causes"] for one in answer["violations"]}
        assert causes["gradient"] == ["gradient x W"], answer
    bundle = str(tmp_path / "kept" / "step-1")
    model = f"{Path(__file__).parent / 'scenarios.py'}:net"
    done = CliRunner().invoke(main, ["replay", bundle, "--model", model])
    assert "reproduced: the same verdict on step 1" in done.output, done.output


def test_a_script_may_divide_what_was_summed(ask: Ask) -> None:
    for answer in ask("changed", ranks=3, wrap="ddp", change="divided by W", fault=True):
        assert "gradient" in held(answer) and answer["unjudged"] == {}, answer


@pytest.mark.parametrize(
    ("wrap", "change", "cause"),
    [
        ("ddp", "divided by W", "gradient / W"),
        ("fsdp2", "divided by W", "gradient / W"),
        ("plain", "summed", "gradient x W"),
        ("fsdp2", "by own norm", "ranks disagree"),
        ("fsdp1", "by own norm", "ranks disagree"),
    ],
)
def test_what_contradicts_the_declaration(ask: Ask, wrap: str, change: str, cause: str) -> None:
    for answer in ask("changed", ranks=3, wrap=wrap, change=change):
        causes = {one["obligation"]: one["causes"] for one in answer["violations"]}
        assert causes["gradient"] == [cause], answer


def test_a_gradient_that_is_lost_is_found(ask: Ask) -> None:
    for answer in ask("changed", wrap="ddp", change="zeroed"):
        assert "gradient" in [one["obligation"] for one in answer["violations"]], answer


def test_a_reduction_by_the_script_ends_after_the_backward(ask: Ask) -> None:
    for answer in ask("changed", ranks=3, wrap="plain", change="averaged"):
        assert "gradient" in held(answer) and answer["unjudged"] == {}, answer


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_scale_by_tokens(ask: Ask, wrap: str) -> None:
    """One factor is a part of the weights of tokens, where they are declared."""
    for answer in ask("scaled_by_tokens", wrap=wrap, divisor="right", declared=True):
        assert {"gradient", "loss", "update"} <= held(answer) and answer["unjudged"] == {}
    for answer in ask("scaled_by_tokens", wrap=wrap, divisor="right", declared=False):
        assert {"gradient", "update"} <= held(answer)
        assert "it multiplies every gradient by 0.0454545" in answer["unjudged"]["gradient"]
        assert answer["summary"].count(REPORTED) == 1


def test_a_wrong_scale_by_tokens_is_named(ask: Ask) -> None:
    answer = ask("scaled_by_tokens", wrap="ddp", divisor="without ranks", declared=True)[0]
    (found,), (text,) = answer["violations"], answer["texts"]
    assert (found["obligation"], found["causes"]) == ("loss", ["gradient / W"])
    assert "add up to that, not to 1; it is 1 / the number of ranks" in text
    assert "the weight in the loss times 0.0227273, by which the script multiplies" in text
    answer = ask("scaled_by_tokens", wrap="fsdp2", divisor="own tokens", declared=True)[0]
    assert answer["texts"][0].startswith("between the backward and the step, rank "), answer
