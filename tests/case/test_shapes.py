"""What is said of a model's parameters without building it."""

from __future__ import annotations

import pytest

from zerocheck.case.schema import Block, Model, UserModel, UserParameter
from zerocheck.case.shapes import (
    empties,
    graph_differs,
    overflowing,
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


def test_a_gradient_overflows_alone_where_every_microbatch_has_it() -> None:
    model = Model(
        blocks=(Block(kind="layer_norm", empty=True), Block(kind="mlp"), EXPERTS),
        calls=(0, 2),
        side=True,
        unused=True,
        frozen=("stem.*",),
    )
    assert overflowing(model) == (
        "blocks.0.norm.weight",
        "blocks.0.norm.bias",
        "blocks.2.experts.weight",
        "blocks.2.experts.bias",
        "head.weight",
        "head.bias",
    )


def test_of_the_users_own_model_the_forward_calls_the_module() -> None:
    names = ("scale", "up.weight", "inner.weight", "idle.weight", "old.weight")
    user = UserModel(
        factory="m:f",
        parameters=tuple(
            UserParameter(
                name=name,
                shape=(2,),
                used="never" if name == "idle.weight" else "always",
                trains=name != "old.weight",
            )
            for name in names
        ),
        order=("up", "idle", "old"),
    )
    assert overflowing(Model(user=user)) == ("up.weight",)


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
