"""With reference=, outputs of a model may depend on one another and have any form."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import Ask, held
from output_scenarios import FORMS
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerocheck


@pytest.mark.every(2)
@pytest.mark.parametrize("wrap", ["ddp", "ddp_unused", "flat_fsdp1", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("loss", ["inner", "outer", "weighted"])
def test_a_loss_from_inside_and_logits_hold(ask: Ask, wrap: str, loss: str) -> None:
    for answer in ask("outputs", wrap=wrap, loss=loss):
        assert {"gradient", "update"} <= held(answer) and answer["unjudged"] == {}, answer


@pytest.mark.every(4)
@pytest.mark.parametrize("wrap", ["ddp", "ddp_unused", "fsdp2"])
@pytest.mark.parametrize("form", [one for one in FORMS if one not in ("object", "slots")])
def test_forms_of_outputs_hold(ask: Ask, wrap: str, form: str) -> None:
    for answer in ask("outputs", wrap=wrap, form=form):
        assert {"gradient", "update"} <= held(answer) and answer["unjudged"] == {}, answer


def test_an_object_is_a_container_for_ddp_only(ask: Ask) -> None:
    """FSDP2 finds no outputs in it, and reduces nothing."""
    for answer in ask("outputs", wrap="ddp", form="object"):
        assert {"gradient", "update"} <= held(answer) and answer["unjudged"] == {}, answer
    for answer in ask("outputs", wrap="fsdp2", form="object"):
        assert answer["violations"][0]["causes"] == ["gradient missing"]


def test_outputs_that_cannot_be_seen_are_not_judged(ask: Ask) -> None:
    for answer in ask("outputs", form="slots"):
        assert "update" in held(answer)
        assert "not among its outputs" in answer["unjudged"]["gradient"]


@pytest.mark.parametrize("wrap", ["plain", "fsdp2"])
@pytest.mark.parametrize("loss", ["chained", "input"])
def test_outputs_that_go_in_again_hold(ask: Ask, wrap: str, loss: str) -> None:
    for answer in ask("outputs", wrap=wrap, loss=loss, ranks=1):
        assert {"gradient", "update"} <= held(answer) and answer["unjudged"] == {}, answer


@pytest.mark.parametrize("wrap", ["plain", "ddp", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("reentrant", [1, 2])
def test_reentrant_checkpoints_in_the_model_hold(ask: Ask, wrap: str, reentrant: int) -> None:
    """Their backward starts others, which reach the parameters from within the model."""
    ranks = 1 if wrap == "plain" else 2
    for answer in ask("outputs", wrap=wrap, reentrant=reentrant, ranks=ranks):
        assert {"gradient", "update"} <= held(answer) and answer["unjudged"] == {}, answer


@pytest.mark.every(2)
@pytest.mark.parametrize("form", ["dict", "model_output"])
@pytest.mark.parametrize("wrap", ["ddp_unused", "fsdp2"])
def test_a_wrong_gradient_is_named(ask: Ask, wrap: str, form: str) -> None:
    for answer in ask("outputs", wrap=wrap, form=form, world=True, ranks=3):
        found = {one["obligation"]: one for one in answer["violations"]}
        assert "gradient x W" in found["gradient"]["causes"], answer


class Both(nn.Module):
    """Loss and logits, in one process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": logits.square().mean(), "logits": logits, "input": x}


def judged(tmp_path: Path, step: Any, model: nn.Module | None = None) -> Any:
    """The verdict on one step; step(model) comes to the gradients."""
    model = model or Both()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    check = zerocheck.attach(
        model, optimizer, reference=Both, directory=tmp_path / "kept", on_violation="warn"
    )
    with check.step():
        step(model)
        optimizer.step()
    assert check.last is not None
    return check.last


def reason(tmp_path: Path, step: Any) -> str:
    last = judged(tmp_path, step)
    assert not last.violations
    return str(last.unjudged.get("gradient", ""))


BATCH = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))


def test_what_reaches_the_outputs_otherwise_is_not_judged(tmp_path: Path) -> None:
    def gradients(model: nn.Module) -> None:
        found = torch.autograd.grad(model(BATCH)["loss"], [*model.parameters()])
        for parameter, one in zip(model.parameters(), found, strict=True):
            parameter.grad = one

    assert "not started by torch.autograd.backward" in reason(tmp_path, gradients)

    def some(model: nn.Module) -> None:
        model(BATCH)["loss"].backward(inputs=[model.layer.weight])

    assert "some of the parameters only" in reason(tmp_path, some)

    def changed(model: nn.Module) -> None:
        outputs = model(BATCH)
        outputs["logits"].register_hook(lambda gradient: gradient * 2)
        outputs["loss"].backward()

    assert "changes its gradient" in reason(tmp_path, changed)

    def embedded(model: nn.Module) -> None:
        model(BATCH + model.layer.bias)["loss"].backward()

    assert "an input uses layer.bias" in reason(tmp_path, embedded)

    def checkpointed(model: nn.Module) -> None:
        logits = model(BATCH)["logits"]
        loss = checkpoint(lambda x: (x @ model.layer.weight).mean(), logits, use_reentrant=True)
        loss.backward()

    assert "loss or an input uses layer.weight" in reason(tmp_path, checkpointed)


def test_what_scripts_do_with_outputs_holds(tmp_path: Path) -> None:
    def observed(model: nn.Module) -> None:
        outputs = model(BATCH)
        outputs["logits"].retain_grad()
        outputs["logits"].register_hook(lambda gradient: None)
        outputs["loss"].backward(retain_graph=True)
        outputs["loss"].backward()

    def in_place(model: nn.Module) -> None:
        outputs = model(BATCH)
        (outputs["loss"] + outputs["logits"].mul(1.0).div_(3.0).sum()).backward()

    def several(model: nn.Module) -> None:
        first, second = model(BATCH), model(2 * BATCH)
        torch.autograd.backward([first["loss"], second["logits"]], [None, torch.ones(3, 4)])

    def cleared(model: nn.Module) -> None:
        model.zero_grad()
        model(BATCH)["loss"].backward()

    def evaluated(model: nn.Module) -> None:
        with torch.no_grad():
            model(BATCH)
        model(BATCH)
        model(BATCH)["loss"].backward()

    for step in (observed, in_place, several, cleared, evaluated):
        last = judged(tmp_path, step)
        assert last.statuses["gradient"] == "holds" and not last.unjudged, step


def test_a_gradient_from_before_is_cleared_before_the_first_backward(tmp_path: Path) -> None:
    """As by Lightning, between forward and backward."""
    model = Both()
    model(BATCH)["loss"].backward()

    def step(model: nn.Module) -> None:
        loss = model(BATCH)["loss"]
        model.zero_grad()
        loss.backward()

    assert judged(tmp_path, step, model).statuses["gradient"] == "holds"
    stale = judged(tmp_path, lambda model: model(BATCH)["loss"].backward(), model)
    assert "gradients of before the step" in stale.unjudged["gradient"]


def test_a_backward_within_the_forward_is_named(tmp_path: Path) -> None:
    """As manual optimization under DDP does: nothing comes to an output from outside."""

    class Itself(Both):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            super().forward(x)["loss"].backward()
            return {}

    last = judged(tmp_path, lambda model: model(BATCH), Itself())
    assert "runs a backward itself" in last.unjudged["gradient"]
    assert last.statuses["update"] == "holds"


def test_modules_in_another_mode_are_so_in_the_reference(tmp_path: Path) -> None:
    class Frozen(Both):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return super().forward(self.dropout(x))

    model = Frozen()
    model.dropout.eval()
    optimizer = torch.optim.AdamW(model.parameters())
    check = zerocheck.attach(model, optimizer, reference=Frozen, directory=tmp_path)
    with check.step():
        model(BATCH)["loss"].backward()
        optimizer.step()
    assert check.last is not None and check.last.statuses["gradient"] == "holds"


def test_the_hooks_change_no_bit_and_go(tmp_path: Path) -> None:
    grads = []
    for steps in ((), (1,)):
        model = Both()
        optimizer = torch.optim.AdamW(model.parameters())
        check = zerocheck.attach(
            model, optimizer, reference=Both, steps=steps, every=None, directory=tmp_path
        )
        with check.step():
            outputs = model(BATCH)
            (outputs["loss"] + outputs["logits"].sin().sum() * 0.3).backward()
            optimizer.step()
        grads.append(model.layer.weight.grad)
        del outputs
    assert torch.equal(*grads)
    gc.collect()
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert not model._forward_hooks and not model._forward_pre_hooks
