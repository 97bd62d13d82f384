"""Inspection of the user's own model says what it is, or why it cannot be judged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zerocheck.case.schema import Case, Model, UserModel
from zerocheck.case.shapes import parameter_shapes, sometimes_used, trainable, transposed, uncalled
from zerocheck.errors import UsageError
from zerocheck.models.inspection import inspect_model

MODELS = Path(__file__).parents[1] / "own_models.py"


def looked(name: str) -> UserModel:
    return inspect_model(f"{MODELS}:{name}")


def test_a_transformer_with_a_tied_head() -> None:
    state = torch.get_rng_state()
    found = looked("gpt")
    assert torch.equal(state, torch.get_rng_state())
    assert set(found.features) == {"stem-embedding", "block-layer-norm", "dropout", "tied"}
    shapes = parameter_shapes(Model(user=found))
    assert shapes["wte.weight"] == (20, 8) and "head.weight" not in shapes
    assert found.order[:4] == ("wte", "wpe", "layers.0", "layers.0.norm")
    assert found.buffers
    assert {one.used for one in found.parameters} == {"always"}


def test_batch_norm_and_no_buffers() -> None:
    found = looked("conv")
    assert set(found.features) == {"block-conv", "block-batch-norm"}
    assert not looked("moe").buffers


def test_experts_are_used_sometimes() -> None:
    model = Model(user=looked("moe"))
    assert set(sometimes_used(model)) == {
        f"experts.{number}.{name}" for number in range(3) for name in ("weight", "bias")
    }
    assert uncalled(model) == ()


def test_modules_whose_weights_are_used_without_a_call() -> None:
    assert looked("bypassing").bypassed == (
        "blocks.0",
        "blocks.0.0",
        "body",
        "body.0",
        "head",
        "scales",
    )
    for name in ("gpt", "conv", "moe", "plain"):
        assert looked(name).bypassed == ()


def test_what_is_frozen_unused_bf16_and_transposed() -> None:
    found = looked("odd")
    model = Model(user=found)
    assert "wte.weight" not in trainable(model) and "gain" in trainable(model)
    assert uncalled(model) == ("unused.weight", "unused.bias")
    assert transposed(model) == ("turned",)
    assert {one.name for one in found.parameters if one.dtype == "bf16"} == {
        "narrow.weight",
        "narrow.bias",
    }
    assert set(found.features) == {"stem-embedding", "module-twice", "mixed-dtypes"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("alone", r"returns the model alone; needed is \(model, batch\) or \(model, batch, loss\)"),
        ("failing", "fails: RuntimeError: no weights here"),
        ("not_seeded", "built twice from the same seed of torch, bias differs"),
        ("fixed_batch", "all ranks would read the same samples"),
        ("global_batch", "input 0 differs for the same generator"),
        ("double", r"parameter weight has dtype torch.float64; allowed: torch.float32, torch.bf"),
        ("vector_loss", r"a tensor of shape \(2, 1\) and dtype torch.float32; needed is the loss"),
        ("no_target", r"returns Tensor; needed is a pair \(inputs, target\)"),
        ("batch_takes_nothing", r"takes \(\); needed is batch\(generator\)"),
        ("nothing_trains", "depends on no parameter that trains"),
        ("counting", "keeps a state between forwards that is in no buffer.* the loss is"),
        ("random_forward", "is not deterministic.*the loss is"),
        ("meta", "puts weight on meta; needed is the CPU"),
        ("lazy", "weight has no shape yet"),
        ("infinite", "is nan; needed is a finite one"),
        ("broken_forward", "the forward of .* fails: RuntimeError: mat1 and mat2"),
        ("number", "is of type int; needed is a function"),
        ("gptt", "has no 'gptt'; did you mean 'gpt'?"),
    ],
)
def test_what_cannot_be_judged(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        looked(name)


def test_a_name_without_a_function() -> None:
    with pytest.raises(UsageError, match="name the function that makes the model too"):
        inspect_model(str(MODELS))
    with pytest.raises(UsageError, match="there is no file"):
        inspect_model("nowhere.py:gpt")


def test_what_a_look_gives_is_a_case() -> None:
    case = Case(model=Model(user=looked("gpt")))
    assert hash(case) == hash(Case(model=Model(user=looked("gpt"))))
