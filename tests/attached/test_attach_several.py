"""Optimizers of a job: several in a list, one `attach` for each, and parameters that none has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import Ask, held
from decaying import DecaysTwice
from three_steps import attached, net
from torch import nn

import zerocheck
from zerocheck.attached.session import Attached


def both(
    model: nn.Module, first: Any = torch.optim.AdamW, second: Any = torch.optim.SGD
) -> list[torch.optim.Optimizer]:
    """Two optimizers, each with half of the parameters."""
    parameters = [*model.parameters()]
    return [first(parameters[:2], lr=1e-2), second(parameters[2:], lr=1e-1)]


def train(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    *checks: Attached,
    waits: Callable[[int, int], bool] = lambda number, at: False,
    count: int = 3,
) -> None:
    """Take steps. waits(step, optimizer): it takes none in this one."""
    for number in range(count):
        for check in checks:
            check.before()
        model(torch.randn(4, 5)).square().mean().backward()
        for at, optimizer in enumerate(optimizers):
            if not waits(number, at):
                optimizer.step()
        for check in checks:
            check.after()
        model.zero_grad()


@pytest.mark.parametrize("second", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_a_list_holds(tmp_path: Path, second: Any) -> None:
    model = net()
    optimizers = both(model, second=second)
    check = attached(model, optimizers, tmp_path, reference=net)
    train(model, optimizers, check)
    assert check.last is not None and not check.wrong, check.summary
    assert held_of(check) >= {"update", "gradient"} and 0 < check.last.share["update"] < 1


def held_of(check: Attached) -> set[str]:
    assert check.last is not None
    return {name for name, status in check.last.statuses.items() if status == "holds"}


@pytest.mark.parametrize("at", [0, 1])
def test_each_is_judged_by_its_own_equations(tmp_path: Path, at: int, capsys: Any) -> None:
    """One of a list is wrong, and named with its tensors."""
    model = net()
    kinds = [torch.optim.SGD, torch.optim.SGD]
    kinds[at] = DecaysTwice
    optimizers = both(model, *kinds)
    optimizers[at].param_groups[0]["weight_decay"] = 0.1
    optimizers[at].wrong = 2  # type: ignore[attr-defined]
    check = attached(model, optimizers, tmp_path)
    train(model, optimizers, check)
    assert check.wrong == 2 and check.last is not None
    (violation,) = check.last.violations
    assert violation.causes == ("weight decay twice",)
    assert {*violation.tensors} == {f"{2 * at}.weight", f"{2 * at}.bias"}
    assert "SGD" in capsys.readouterr().err


def test_one_of_them_may_wait(tmp_path: Path) -> None:
    """As where a second one steps less often; nothing of it is judged then, by name."""
    model = net()
    optimizers = both(model)
    check = attached(model, optimizers, tmp_path, reference=net)
    train(model, optimizers, check, waits=lambda number, at: at == 1 and number == 2)
    assert not check.wrong and check.last is not None
    assert "gradient" in held_of(check)
    assert check.last.unjudged == {"update": "of what SGD has, which took no step, as its gradient"}


def test_what_waits_must_not_change(tmp_path: Path) -> None:
    model = net()
    optimizers = both(model)
    check = attached(model, optimizers, tmp_path)
    check.before()
    model(torch.randn(4, 5)).square().mean().backward()
    optimizers[0].step()
    with torch.no_grad():
        model[2].weight.add_(1.0)
    check.after()
    assert check.last is not None
    (violation,) = check.last.violations
    assert "the optimizer took no step, but it changed parameter" in violation.explanation
    assert violation.tensors == ("2.weight",)


def test_each_may_be_attached_alone(tmp_path: Path) -> None:
    model = net()
    optimizers = both(model)
    checks = [attached(model, one, tmp_path, reference=net) for one in optimizers]
    backward = torch.autograd.backward
    train(model, optimizers, *checks)
    assert torch.autograd.backward is backward
    for check in checks:
        assert not check.wrong, check.summary
        assert held_of(check) >= {"update", "gradient"}


def test_what_none_of_several_attached_has(tmp_path: Path) -> None:
    model = net()
    optimizers = both(model)
    del optimizers[1].param_groups[0]["params"][-1]
    checks = [attached(model, one, tmp_path) for one in optimizers]
    train(model, optimizers, *checks)
    for check in checks:
        assert check.wrong == 3 and check.last is not None
        assert check.last.violations[0].tensors == ("2.bias",)


UNOPTIMIZED = (
    "2.bias was not updated: no optimizer has it, though it is trainable and got a gradient; to "
    "keep it as it is, freeze it with requires_grad_(False)"
)


@pytest.mark.parametrize("zero", ["model", "optimizer"])
def test_what_no_optimizer_has(tmp_path: Path, zero: str) -> None:
    """optimizer.zero_grad() leaves its gradient, which is not said to be a mistake of its own."""
    model = net()
    optimizer = torch.optim.AdamW([*model.parameters()][:-1])
    check = attached(model, optimizer, tmp_path, reference=net)
    for _ in range(3):
        with check.step():
            model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
            (model if zero == "model" else optimizer).zero_grad()
    assert check.wrong == 3 and check.last is not None
    (violation,) = check.last.violations
    assert violation.explanation == UNOPTIMIZED and violation.causes == ("never updated",)
    assert check.last.statuses["gradient"] == "holds" and not check.last.unjudged


@pytest.mark.parametrize("kind", ["frozen", "frozen later", "without a gradient", "zeros"])
def test_what_needs_no_optimizer(tmp_path: Path, kind: str) -> None:
    model = net()
    bias = model[2].bias
    optimizer = torch.optim.AdamW([*model.parameters()][:-1])
    check = attached(model, optimizer, tmp_path)
    if kind == "frozen":
        bias.requires_grad_(False)
    elif kind == "frozen later":
        bias.grad = torch.ones_like(bias)
        bias.requires_grad_(False)
    elif kind == "without a gradient":
        model[2].bias, model.spare = None, bias
    for _ in range(2):
        with check.step():
            out = model[:3](torch.randn(4, 5))
            (out - out.detach().mean() if kind == "zeros" else out).square().sum().backward()
            if kind == "zeros":
                bias.grad = torch.zeros_like(bias)
            optimizer.step()
            optimizer.zero_grad()
    assert not check.wrong, check.summary


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda model: [], "an empty list of optimizers"),
        (lambda model: [torch.optim.SGD(model.parameters())] * 2, "the same optimizer twice"),
        (
            lambda model: [torch.optim.SGD(model.parameters()), torch.optim.AdamW([model[2].bias])],
            r"2.bias is in several optimizers \(SGD, AdamW; allowed: one optimizer for each",
        ),
        (
            lambda model: [torch.optim.SGD(model.parameters()), torch.optim.AdamW([torch.ones(2)])],
            "none of the 1 parameters of the AdamW is one of the model",
        ),
        (
            lambda model: [torch.optim.SGD(model.parameters()), 3],
            "needs a torch optimizer, got int",
        ),
    ],
)
def test_what_is_no_list_of_optimizers(given: Callable[[Any], Any], message: str) -> None:
    model = net()
    with pytest.raises(zerocheck.errors.UsageError, match=message):
        zerocheck.attach(model, given(model))


def test_a_step_within_the_backward_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One optimizer for each parameter, stepped by a hook; the training goes on."""
    model = net()
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}
    check = attached(model, [*optimizers.values()], tmp_path)

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    before = [one.detach().clone() for one in model.parameters()]
    for _ in range(3):
        with check.step():
            model(torch.randn(4, 5)).square().mean().backward()
    said = capsys.readouterr().err
    assert said.count("takes its step within the backward") == 1, said
    assert "the training goes on" in said and check.last is None
    assert not any(map(torch.equal, before, model.parameters()))


def test_a_scaler_skips_one_of_them(tmp_path: Path) -> None:
    """Each is skipped by its own gradient; a wrong decision is seen for each."""
    for skips in (True, False):
        model = net()
        optimizers = both(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        check = attached(model, optimizers, tmp_path / str(skips))
        with check.step():
            scaler.scale(model(torch.randn(4, 5)).square().mean()).backward()
            model[2].weight.grad[0, 0] = torch.inf
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            if not skips:
                state = scaler._per_optimizer_states[id(optimizers[1])]
                state["found_inf_per_device"] = {torch.device("cpu"): torch.zeros(1)}
            for optimizer in optimizers:
                scaler.step(optimizer)
        assert check.last is not None
        causes = [cause for one in check.last.violations for cause in one.causes]
        assert causes == ([] if skips else ["step not skipped"]), check.last


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "fsdp1"])
def test_on_ranks(ask: Ask, wrap: str) -> None:
    for answer in ask("several", wrap=wrap):
        assert {"ownership", "update", "gradient"} <= held(answer)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "fsdp1"])
def test_no_optimizer_on_ranks(ask: Ask, wrap: str) -> None:
    for answer in ask("several", wrap=wrap, skips=True):
        assert answer["violations"][0]["causes"] == ["never updated"], answer
        assert answer["violations"][0]["tensors"] == ["3.bias"], answer
