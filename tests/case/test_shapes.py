"""What is said of a model's parameters without building it."""

from __future__ import annotations

import pytest

from zerocheck.case.schema import Block, Model
from zerocheck.case.shapes import (
    empties,
    graph_differs,
    scalars,
    sometimes_used,
    transposed,
)

EXPERTS = Block(kind="experts", experts=2, hidden=3)


def test_sometimes_used() -> None:
    blocks = (Block(kind="mlp"), EXPERTS, Block(kind="experts", experts=1), EXPERTS)
    assert sometimes_used(Model(blocks=blocks)) == (
        "blocks.1.experts.mlps.",
        "blocks.3.experts.mlps.",
    )
    assert sometimes_used(Model(blocks=blocks, calls=(0, 3, 3), side=True)) == (
        "blocks.3.experts.mlps.",
        "side.",
    )
    assert sometimes_used(Model()) == ()


def test_unusual_shapes() -> None:
    model = Model(
        width=4,
        blocks=(
            Block(kind="mlp", hidden=3, gain=True, transposed=True),
            Block(kind="mlp", hidden=1, transposed=True),
            Block(kind="layer_norm", empty=True, transposed=True),
            Block(kind="recurrent", transposed=True),
        ),
    )
    assert scalars(model) == ("blocks.0.gain",)
    assert empties(model) == ("blocks.2.narrow.weight", "blocks.2.widen.weight")
    assert transposed(model) == (
        "blocks.0.up.weight",
        "blocks.0.down.weight",
        "blocks.3.gru.weight_ih_l0",
        "blocks.3.gru.weight_hh_l0",
    )


@pytest.mark.parametrize(
    ("model", "differs"),
    [
        (Model(side=True), False),
        (Model(side=True, frozen=("stem.*",)), True),
        (Model(side=True, frozen=("stem.weight",)), False),
        (Model(side=True, frozen=("stem.*", "side.*")), False),
        (Model(frozen=("stem.*",), blocks=(EXPERTS,)), False),
        (Model(frozen=("stem.*", "*.mlps.1.*"), blocks=(EXPERTS,)), False),
        (Model(frozen=("stem.*", "*.experts.[wb]*", "*.mlps.1.*"), blocks=(EXPERTS,)), True),
        (Model(frozen=("*.experts.[wb]*", "*.mlps.1.*"), blocks=(EXPERTS,)), False),
        (
            Model(
                frozen=("stem.*", "*.experts.[wb]*", "*.mlps.1.*"),
                blocks=(Block(kind="mlp"), EXPERTS),
            ),
            False,
        ),
    ],
)
def test_graph_differs(model: Model, differs: bool) -> None:
    assert graph_differs(model) is differs
