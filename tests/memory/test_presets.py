"""The presets have the published numbers of parameters, and the modules that we build have them."""

from __future__ import annotations

import pytest

from zerocheck.memory.presets import PRESETS
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


def test_the_head_of_gpt2_is_tied() -> None:
    model = build(PRESETS["gpt2"].with_blocks(1))
    assert model.head.weight is model.embedding.weight
