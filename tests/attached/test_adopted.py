"""What libraries put on a model after it was made is on the reference too, and nothing else is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from three_steps import trained
from torch import nn

from zerocheck.attached.verdict.adopted import adopt, library_forward


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(11, 8), nn.Dropout(0.5)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.embed(ids)))


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def of(library: str, function: Callable[..., Any]) -> Any:
    """The function as if a module of this library had defined it."""
    assert isinstance(function, FunctionType)
    there = {**function.__globals__, "__name__": f"{library}.made_up"}
    return FunctionType(
        function.__code__, there, function.__name__, function.__defaults__, function.__closure__
    )


def with_log_probs(model: nn.Module, library: str = "trl") -> None:
    """A forward as TRL puts it on: the original one and the model are in its closure."""
    original, tail = model.forward, 2 * model.head.bias.numel()

    @functools.wraps(type(model).forward)
    def fused(self: Any, ids: torch.Tensor, fused: bool = True) -> Any:
        logits = original(ids)
        return {"log_probs": logits.log_softmax(-1), "tail": tail, "of": model} if fused else logits

    model.forward = MethodType(of(library, fused), model)


def noise(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
    """As NEFTune does it."""
    return output + torch.zeros_like(output).uniform_(-module.alpha, module.alpha)


def with_noise(model: Any, library: str = "transformers") -> None:
    model.embed.alpha = 0.3
    model.embed.register_forward_hook(of(library, noise))


def without_dropout(model: Any) -> None:
    model.drop.p = 0.0


def everything(model: Any) -> None:
    with_log_probs(model)
    with_noise(model)


def bare(name: str) -> str:
    return name


def test_a_forward_computes_with_the_modules_of_the_reference() -> None:
    run, reference = make_model().eval(), make_model().eval()
    with_log_probs(run)
    nn.init.zeros_(reference.head.weight)
    nn.init.zeros_(reference.head.bias)
    adopt(run, reference, bare)
    run.embed.forward = None  # the run is not called
    found: Any = reference(torch.arange(3))
    assert torch.equal(found["log_probs"], torch.zeros(3, 11).log_softmax(-1))
    assert found["tail"] == 22 and found["of"] is reference
    assert reference(torch.arange(3), fused=False).shape == (3, 11)


def test_what_the_reference_has_stays() -> None:
    run, reference, hook = make_model(), make_model(), of("transformers", noise)
    for model in (run, reference):
        with_log_probs(model)
        model.embed.register_forward_hook(hook)
    forward = reference.forward
    adopt(run, reference, bare)
    assert reference.forward == forward
    assert [*reference.embed._forward_hooks.values()] == [hook]


@pytest.mark.parametrize("library", ["__main__", "torch", "my_trainer"])
def test_functions_of_other_places_are_left_alone(library: str) -> None:
    run, reference = make_model(), make_model()
    with_log_probs(run, library)
    with_noise(run, library)
    adopt(run, reference, bare)
    assert "forward" not in vars(reference) and not reference.embed._forward_hooks


def test_the_class_s_own_forward_behind_decorators_is_none_of_a_library() -> None:
    model = make_model()
    model.forward = MethodType(torch.autocast("cpu", torch.bfloat16)(Model.forward), model)
    assert library_forward(model) is None


def test_a_library_s_forward_is_found_behind_decorators() -> None:
    model = make_model()
    with_log_probs(model)
    inner = model.forward.__func__
    model.forward = MethodType(torch.autocast("cpu", torch.bfloat16)(inner), model)
    assert library_forward(model) is inner


def test_hooks_with_a_closure_are_left_alone() -> None:
    """They may keep what they see, for the loss."""
    run, reference, seen = make_model(), make_model(), []
    run.head.register_forward_hook(of("transformers", lambda *given: seen.append(given)))
    adopt(run, reference, bare)
    assert not reference.head._forward_hooks


def loss(model: Any) -> torch.Tensor:
    outputs = model(torch.randint(11, (4,)))
    outputs = outputs["log_probs"] if isinstance(outputs, dict) else outputs
    return outputs.square().mean()


def changed(change: Callable[[Any], None]) -> Model:
    model = make_model()
    change(model)
    return model


CHANGES = [with_log_probs, with_noise, everything, without_dropout]


@pytest.mark.parametrize(("factor", "status"), [(1.0, "holds"), (3.0, "violated")])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_a_trainer_changed_is_judged(
    change: Callable[[Any], None], factor: float, status: str, tmp_path: Path
) -> None:
    last = trained(changed(change), loss, make_model, tmp_path, factor=factor)
    assert last.statuses["gradient"] == status, last
