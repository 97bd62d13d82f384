"""One microbatch of one rank overflows: its loss, or one element of one gradient alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from zerocheck.case.schema import Block, Case, Model, Training
from zerocheck.case.shapes import overflowing
from zerocheck.errors import Unsupported
from zerocheck.models.batches import batch, loss_of, overflows
from zerocheck.models.network import build_model
from zerocheck.models.overflow import VALUES, Overflow, element_of

BLOCKS = {
    "mlp": Block(kind="mlp", gain=True),
    "attention": Block(kind="attention"),
    "recurrent": Block(kind="recurrent"),
    "experts": Block(kind="experts"),
    "norm": Block(kind="batch_norm", residual=True),
    "transposed": Block(kind="mlp", transposed=True),
    "checkpoint": Block(kind="mlp", checkpoint=True),
    "bf16": Block(kind="mlp", dtype="bf16"),
}
MODELS = {
    **{name: Model(blocks=(block,)) for name, block in BLOCKS.items()},
    "tied": Model(stem="embedding", inputs=5, outputs=5, tied=True, padding_idx=1),
    "twice": Model(blocks=(Block(kind="mlp"),), calls=(0, 0)),
    "small": Model(stem="conv", inputs=1, width=1, outputs=1),
}
SCALED = Training(steps=2, microbatches=2, loss_scale=2.0, overflow=1)
CASES = [(name, parameter) for name, model in MODELS.items() for parameter in overflowing(model)]


def _case(model: str, parameter: str | None, seed: int = 0) -> Case:
    training = replace(SCALED, overflow_in=parameter)
    return Case(seed=seed, model=MODELS[model], training=training)


def _gradients(
    case: Case, call: nn.Module, overflow: Overflow, where: dict[str, int]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a microbatch on this device."""
    drawn = batch(case, **where)
    overflow.enter(**where)
    loss = overflow.of_loss(loss_of(case)(call(*drawn.inputs), drawn.target), **where)
    call.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {n: p.grad for n, p in call.named_parameters() if p.grad is not None}


def _where(case: Case, *, now: bool) -> dict[str, int]:
    """Place of a microbatch that overflows, or of one that does not."""
    places: list[dict[str, int]] = [
        {"step": 1, "rank": rank, "microbatch": number} for rank in range(2) for number in range(2)
    ]
    return next(place for place in places if overflows(case, **place) == now)


@pytest.mark.parametrize(("model", "parameter"), CASES)
def test_one_element_of_one_gradient_overflows(model: str, parameter: str) -> None:
    plain = _case(model, None)
    case = _case(model, parameter)
    where = _where(case, now=True)
    right = _gradients(plain, build_model(plain), Overflow(Case()), where)
    overflow = Overflow(case)
    with overflow.planted():
        loss, found = _gradients(case, build_model(case), overflow, where)
    assert loss == right[0]
    index, value = element_of(case, found[parameter].numel())
    element = found[parameter].contiguous().view(-1)[index]
    assert element.isnan() if math.isnan(value) else element == value
    for name, gradient in right[1].items():
        other = found[name].ne(gradient)
        assert int(other.sum()) == (name == parameter), name


def test_nothing_is_planted_in_other_microbatches_nor_outside() -> None:
    case = _case("mlp", "head.weight")
    overflow = Overflow(case)
    model = build_model(case)
    with overflow.planted():
        loss, found = _gradients(case, model, overflow, _where(case, now=False))
    assert math.isfinite(loss)
    assert all(bool(gradient.isfinite().all()) for gradient in found.values())
    # Where bytes are measured the loss is infinite instead.
    loss, found = _gradients(case, model, overflow, _where(case, now=True))
    assert not math.isfinite(loss)
    assert not any(bool(gradient.isfinite().all()) for gradient in found.values())
    assert not torch.nn.modules.module._global_forward_hooks


def test_a_copy_of_the_model_overflows_too() -> None:
    case = _case("mlp", "stem.bias")
    overflow = Overflow(case)
    with overflow.planted():
        where = _where(case, now=True)
        _, found = _gradients(case, copy.deepcopy(build_model(case)), overflow, where)
    assert [name for name, one in found.items() if not one.isfinite().all()] == ["stem.bias"]


def test_every_value_and_many_elements_are_drawn() -> None:
    drawn = [element_of(_case("mlp", "head.weight", seed), 32) for seed in range(200)]
    assert len({index for index, _ in drawn}) == 32
    counts = [sum(repr(value) == repr(one) for _, one in drawn) for value in VALUES]
    assert min(counts) > 40


def _released(module: Any, *_: object) -> None:
    module.weight.data = module.weight.data[:0]


def _hidden(module: Any, _: object, output: torch.Tensor) -> object:
    return [output.detach()]


@pytest.mark.parametrize(
    ("hook", "message"), [(_released, "it is not whole after"), (_hidden, "returns no tensor")]
)
def test_where_nothing_can_be_planted_that_is_said(
    hook: Callable[..., object], message: str
) -> None:
    """A forward that releases its parameter itself, and one that returns none of its outputs."""
    case = _case("mlp", "head.weight")
    model = build_model(case)
    forward = model.head.forward  # type: ignore[union-attr]

    def other(x: torch.Tensor) -> object:
        output = forward(x)  # type: ignore[operator]
        return hook(model.head, x, output) or output

    model.head.forward = other  # type: ignore[union-attr,assignment]
    overflow = Overflow(case)
    with overflow.planted(), pytest.raises(Unsupported, match=message):
        model(*batch(case, **_where(case, now=False)).inputs)
