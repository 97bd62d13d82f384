"""A gradient that is not cleared between updates is in the next one, and is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from asking import Ask
from three_steps import attached, net
from torch import nn

CAUSE = "gradient of the previous step kept"


@pytest.mark.parametrize("cleared", ["to none", "in place", "by hand", ""])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("clips", [True, False])
def test_between_updates(tmp_path: Path, cleared: str, microbatches: int, clips: bool) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    check = attached(model, optimizer, tmp_path, reference=net)
    for number in range(3):
        with check.step():
            if cleared in ("to none", "in place"):
                optimizer.zero_grad(set_to_none=cleared == "to none")
            elif cleared == "by hand" and number:
                for parameter in model.parameters():
                    parameter.grad.mul_(0)  # type: ignore[union-attr]
            for _ in range(microbatches):
                model(torch.randn(4, 5)).square().mean().backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert check.last is not None
    assert check.wrong == (0 if cleared else 2), check.summary
    if cleared:
        assert check.last.statuses["gradient"] == "holds"
    else:
        (violation,) = check.last.violations
        assert violation.obligation == "gradient" and violation.causes == (CAUSE,)
        assert {*violation.tensors} == {name for name, _ in model.named_parameters()}
        assert "gradient" not in check.last.unjudged


def test_what_another_loss_adds_is_cleared_in_time(tmp_path: Path) -> None:
    """As in a GAN: the loss of one model reaches the other, which is cleared before its own."""
    makes, judges = net(), nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    first = torch.optim.AdamW(makes.parameters())
    check = attached(makes, first, tmp_path, reference=net)
    second = torch.optim.AdamW(judges.parameters())
    for _ in range(3):
        with check.step():
            second.zero_grad()
            judges(makes(torch.randn(4, 5)).detach()).square().mean().backward()
            second.step()
            first.zero_grad()
            judges(makes(torch.randn(4, 5))).mean().backward()
            first.step()
    assert not check.wrong and check.last is not None, check.summary
    assert "update" in check.last.statuses


@pytest.mark.parametrize("wrap", ["ddp", "fsdp1", "fsdp2"])
def test_under_wrappers(ask: Ask, wrap: str) -> None:
    """FSDP1 accumulates in another tensor: there the gradient is not judged, with the question."""
    for answer in ask("referenced", wrap=wrap, fault="kept"):
        if wrap == "fsdp1":
            assert "zero_grad() missing" in answer["unjudged"]["gradient"]
            continue
        assert [CAUSE] in [found["causes"] for found in answer["violations"]], answer
