"""Weights of tokens: where they are declared alike, each counts as much, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from asking import Ask
from click.testing import CliRunner

from zerocheck.attached.verdict.token_weights import OTHER_LOSS, SURE, judge_weights, weights_of
from zerocheck.cli import main

MODEL = f"{Path(__file__).parent / 'token_scenarios.py'}:reader"


@pytest.mark.parametrize(
    "given",
    [
        {"wrap": "ddp"},
        {"wrap": "fsdp2"},
        {"wrap": "ddp", "autocast": True},
        {"wrap": "ddp", "scales": True},
        {"wrap": "ddp", "ranks": 3},
    ],
    ids=str,
)
def test_right_weights_hold(ask: Ask, given: dict[str, Any]) -> None:
    for answer in ask("tokens", **given):
        assert answer["violations"] == [] and answer["unjudged"] == {}, answer
        assert answer["statuses"]["loss"] == "holds"


# loss: (cause, part of the sentence)
WRONG = {
    "mean of means": ("mean of means", "every microbatch counts alike"),
    "own tokens": ("mean of means", "every rank counts alike"),
    "without ranks": ("gradient / W", "not to 1; it is 1 / the number of ranks"),
    "not divided": ("gradient x GA", "not to 1; it is the number of microbatches"),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("loss", WRONG)
def test_wrong_weights_are_named(ask: Ask, tmp_path: Path, loss: str, autocast: bool) -> None:
    cause, sentence = WRONG[loss]
    answer = ask("tokens", loss=loss, autocast=autocast)[0]
    (found,) = answer["violations"]
    assert (found["obligation"], found["role"], found["causes"]) == ("loss", "loss", [cause])
    bundle = str(tmp_path / "kept" / "step-1")
    done = CliRunner().invoke(main, ["replay", bundle, "--model", MODEL])
    assert done.exit_code == 1 and sentence in done.output, done.output
    assert "reproduced: the same verdict on step 1" in done.output
    alone = CliRunner().invoke(main, ["replay", bundle])
    assert "its gradient was not judged again" in alone.output


def test_what_is_not_declared_is_not_judged(ask: Ask) -> None:
    answer = ask("tokens", loss="mean of means", declared=False)[0]
    assert answer["violations"] == [] and answer["statuses"]["loss"] == "not exercised"


def test_another_loss_is_not_judged(ask: Ask) -> None:
    answer = ask("tokens", loss="smooth")[0]
    assert answer["violations"] == [] and answer["unjudged"] == {"loss": OTHER_LOSS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_whose_gradient_vanishes(dtype: torch.dtype) -> None:
    """A model that knows a token for sure; nobody can tell it from one that is left out."""
    logits = torch.randn(10, 30, generator=torch.Generator().manual_seed(0))
    logits[:3, 7] = 200.0
    logits = logits.to(dtype).requires_grad_()
    target = torch.full((10,), 7)
    torch.nn.functional.cross_entropy(logits.float(), target).backward()
    found = weights_of(logits, logits.grad)
    assert (found.count, found.unsure, found.reason) == (7, 3, "")
    assert judge_weights([[found]], step=1, scale=1.0, world_size=1) == (None, "")
    unequal, _ = judge_weights([[found]], step=1, scale=1.0, world_size=2)
    assert unequal is not None
    sure = logits[:3].detach().clone()
    sure[:, 3] = 190.0
    sure.requires_grad_()
    torch.nn.functional.cross_entropy(sure.float(), target[:3]).backward()
    assert weights_of(sure, sure.grad).reason == SURE


@pytest.mark.parametrize("columns", [2, 50, 50_257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_weights_are_within_the_bound(columns: int, dtype: torch.dtype) -> None:
    """At most half of it is used, over logits of several sizes."""
    for size in (0.1, 3.0, 20.0):
        draw = torch.Generator().manual_seed(columns)
        logits = (size * torch.randn(40, columns, generator=draw)).to(dtype).requires_grad_()
        target = torch.randint(columns, (40,), generator=draw)
        loss = torch.nn.functional.cross_entropy(logits.float(), target, reduction="sum")
        (loss * 0.37).backward()
        found = weights_of(logits, logits.grad)
        assert found.reason == "" and found.count == 40
        assert (found.high - found.low) / 0.37 <= found.bound
        unequal, _ = judge_weights([[found], [found]], step=1, scale=1.0, world_size=1)
        assert unequal is not None and "the loss is 29." in unequal.explanation
