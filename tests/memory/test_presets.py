"""The presets have the published numbers of parameters, and the modules that we build have them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from zerocheck.memory.experts import EVEN_ROUTING, MixtureOfExperts
from zerocheck.memory.operations import forward_operations
from zerocheck.memory.presets import PRESETS
from zerocheck.memory.setup import Setup
from zerocheck.memory.source import ModelSource, source
from zerocheck.memory.transformer import build


@pytest.mark.parametrize("name", PRESETS)
def test_the_module_has_as_many_parameters_as_the_shape(name: str) -> None:
    shape = PRESETS[name].with_blocks(3)
    model = build(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.elements()
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", [name for name in PRESETS if PRESETS[name].published])
def test_published(name: str) -> None:
    assert PRESETS[name].elements() == PRESETS[name].published


def test_those_that_are_published_rounded() -> None:
    assert round(PRESETS["gpt3-175b"].elements() / 1e9) == 175
    assert round(PRESETS["zero-7.5b"].elements() / 1e9, 1) == 7.5


@pytest.mark.parametrize(("name", "narrow"), [("llama-70b", 1024), ("llama-7b", 4096)])
def test_grouped_queries(name: str, narrow: int) -> None:
    shape = PRESETS[name]
    parameters = dict(build(shape.with_blocks(1)).named_parameters())
    assert parameters["blocks.0.attention.key.weight"].shape == (narrow, shape.width)
    assert parameters["blocks.0.attention.query.weight"].shape == (shape.width, shape.width)
    assert parameters["blocks.0.mlp.up.weight"].shape == (shape.hidden, shape.width)


def test_all_experts_are_held_and_a_token_takes_a_few() -> None:
    whole = PRESETS["mixtral-8x7b"].with_blocks(1)
    shape = replace(whole, width=32, heads=4, key_value_heads=2, hidden=48, vocabulary=64)
    model = build(shape)
    experts = [name for name, _ in model.named_parameters() if "mlp.experts." in name]
    assert len(experts) == 3 * 8
    setup = Setup(model="mixtral-8x7b", batch=2, sequence=6)
    counted = forward_operations(ModelSource("small", shape, lambda: model), setup)
    taken = {path: n for path, n in counted.modules.items() if path.endswith("blocks.0.mlp")}
    tokens, router = 2 * 6, 8 * 32
    assert list(taken.values()) == [2 * tokens * (router + 2 * 3 * 32 * 48)]


def test_even_routing_is_of_models_with_experts_alone() -> None:
    assert source("mixtral-8x7b").assumes(Setup(model="mixtral-8x7b")) == (EVEN_ROUTING,)
    assert source("llama3-8b").assumes(Setup(model="llama3-8b")) == ()


def test_experts_compute_with_data() -> None:
    """With one expert, taken by all tokens, it is that expert."""
    torch.manual_seed(1)
    expert = nn.Linear(6, 6)
    mixture = MixtureOfExperts(6, [expert], 1)
    x = torch.randn(2, 5, 6)
    assert torch.allclose(mixture(x), expert(x))


def test_the_head_of_gpt2_is_tied() -> None:
    model = build(PRESETS["gpt2"].with_blocks(1))
    assert model.head.weight is model.embedding.weight
