"""Which modules become units."""

from __future__ import annotations

import torch
from torch import nn

from zerocheck.adapters.shared.units import in_order_of_calls, members, skeleton, unit_modules
from zerocheck.case.schema import Block, Case, Model, Sharding
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
    assert unit_modules(_Model(), Sharding(wrap="whole")) == []


def test_blocks_with_parameters_each_once() -> None:
    model = _Model()
    assert unit_modules(model, Sharding(wrap="block")) == [model.blocks[0], model.blocks[1]]


def test_layers_keep_children_whose_parameters_their_parent_uses() -> None:
    model = _Model()
    first = model.blocks[0]
    assert isinstance(first, nn.Sequential)
    expected = [model.stem, first[0], first[2], model.blocks[1], model.head]
    assert unit_modules(model, Sharding(wrap="layer")) == expected


def test_tied_modules_stay_in_the_root() -> None:
    model = _Model(tied=True)
    units = unit_modules(model, Sharding(wrap="layer"))
    assert model.stem not in units and model.head not in units and len(units) == 3


def test_a_block_that_shares_with_the_root_stays_in_the_root() -> None:
    model = _Model()
    model.head.weight = nn.Parameter(torch.zeros(4, 4))
    first = model.blocks[0]
    assert isinstance(first, nn.Sequential)
    first[0].weight = model.head.weight
    assert unit_modules(model, Sharding(wrap="block")) == [model.blocks[1]]


def test_what_only_some_ranks_call_is_no_unit() -> None:
    blocks = (Block(kind="experts"), Block(kind="mlp"), Block(kind="experts", gain=True))
    model = build_model(Case(model=Model(blocks=blocks, side=True)))
    first, second, third = model.blocks
    assert unit_modules(model, Sharding(wrap="layer")) == [
        *(model.stem, first.experts, second.up, second.down, third, model.head)
    ]
    assert unit_modules(model, Sharding(wrap="block")) == [first, second, third]
    for wrap in ("block", "layer", "whole"):
        inside = {m for unit in unit_modules(model, Sharding(wrap=wrap)) for m in unit.modules()}  # type: ignore[arg-type]
        assert model.side not in inside


def test_a_module_around_a_conditional_child_is_one_unit() -> None:
    outer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    outer[1].no_unit = True  # type: ignore[assignment]
    model = nn.Sequential(nn.Linear(4, 4), outer)
    assert unit_modules(model, Sharding(wrap="layer")) == [model[0], outer]


def test_by_size_from_the_layers_up() -> None:
    """A layer that is large enough, or else what is made of layers; the rest is in the root."""
    model = _Model()
    first = model.blocks[0]
    assert isinstance(first, nn.Sequential)
    assert unit_modules(model, Sharding(wrap="size", bucket=8)) == [
        model.stem, first[0], first[2], model.blocks[1], model.head
    ]  # fmt: skip
    assert unit_modules(model, Sharding(wrap="size", bucket=21)) == [
        model.stem, first, model.blocks[1], model.head
    ]  # fmt: skip
    assert unit_modules(model, Sharding(wrap="size", bucket=29)) == [
        model.blocks[1], model.head
    ]  # fmt: skip
    assert unit_modules(model, Sharding(wrap="size", bucket=1000)) == []


def test_units_in_the_order_of_calls() -> None:
    """A block that is not called gathers nothing; one that is called twice counts once."""
    blocks = tuple(Block(kind="mlp") for _ in range(3))
    case = Case(model=Model(blocks=blocks, calls=(2, 0, 2)), sharding=Sharding(wrap="layer"))
    model = skeleton(case)
    paths = {module: path for path, module in model.named_modules()}
    units = in_order_of_calls(model, unit_modules(model, case.sharding), case)
    assert [paths[unit] for unit in units] == [
        "stem", "blocks.2.up", "blocks.2.down", "blocks.0.up", "blocks.0.down", "head"
    ]  # fmt: skip


def test_members_of_nested_units() -> None:
    """A parameter is of the innermost unit around it; a tied one of each that uses it."""
    model = _Model(tied=True)
    held = members(model, [model.stem, model.blocks[0]])
    assert held["stem"] == ["stem.weight"]
    assert held["blocks.0"] == ["blocks.0.0.weight", "blocks.0.0.bias", "blocks.0.2.weight",
                                "blocks.0.2.bias"]  # fmt: skip
    assert "stem.weight" in held[""] and "scale" in held[""]


def test_a_skeleton_has_no_memory() -> None:
    case = Case(model=Model(blocks=(Block(kind="conv"),), frozen=("head.*",)))
    model = skeleton(case)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert not model.get_parameter("head.weight").requires_grad
    assert model.get_parameter("stem.weight").requires_grad
