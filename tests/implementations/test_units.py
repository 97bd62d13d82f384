"""Which modules become units."""

from __future__ import annotations

import torch
from torch import nn

from zerocheck.case.schema import Block, Case, Model
from zerocheck.implementations.units import unit_modules
from zerocheck.models import build_model


class _Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.stem = nn.Embedding(6, 4)
        first = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))
        self.blocks = nn.ModuleList([first, nn.MultiheadAttention(4, 2), nn.ReLU(), first])
        self.head = nn.Linear(4, 6)
        if tied:
            self.head.weight = self.stem.weight
        self.scale = nn.Parameter(torch.ones(()))


def test_whole_has_the_root_only() -> None:
    assert unit_modules(_Model(), "whole") == []


def test_blocks_with_parameters_each_once() -> None:
    model = _Model()
    assert unit_modules(model, "block") == [model.blocks[0], model.blocks[1]]


def test_layers_keep_children_whose_parameters_their_parent_uses() -> None:
    model = _Model()
    first = model.blocks[0]
    assert isinstance(first, nn.Sequential)
    expected = [model.stem, first[0], first[2], model.blocks[1], model.head]
    assert unit_modules(model, "layer") == expected


def test_tied_modules_stay_in_the_root() -> None:
    model = _Model(tied=True)
    units = unit_modules(model, "layer")
    assert model.stem not in units and model.head not in units and len(units) == 3


def test_a_block_that_shares_with_the_root_stays_in_the_root() -> None:
    model = _Model()
    model.head.weight = nn.Parameter(torch.zeros(4, 4))
    first = model.blocks[0]
    assert isinstance(first, nn.Sequential)
    first[0].weight = model.head.weight
    assert unit_modules(model, "block") == [model.blocks[1]]


def test_what_only_some_ranks_call_is_no_unit() -> None:
    blocks = (Block(kind="experts"), Block(kind="mlp"), Block(kind="experts", gain=True))
    model = build_model(Case(model=Model(blocks=blocks, side=True)))
    first, second, third = model.blocks
    assert unit_modules(model, "layer") == [
        *(model.stem, first.experts, second.up, second.down, third, model.head)
    ]
    assert unit_modules(model, "block") == [first, second, third]
    for wrap in ("block", "layer", "whole"):
        inside = {m for unit in unit_modules(model, wrap) for m in unit.modules()}  # type: ignore[arg-type]
        assert model.side not in inside


def test_a_module_around_a_conditional_child_is_one_unit() -> None:
    outer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    outer[1].conditional = True  # type: ignore[assignment]
    model = nn.Sequential(nn.Linear(4, 4), outer)
    assert unit_modules(model, "layer") == [model[0], outer]
