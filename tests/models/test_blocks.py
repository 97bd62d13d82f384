"""Blocks beyond plain layers: they compute what they say, with gradients where they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from zerocheck.case.codec import merged
from zerocheck.case.schema import Block, Case, Data, Model, Start
from zerocheck.case.validity import check
from zerocheck.contract.start import initial_state
from zerocheck.models import batch, build_model

torch.set_num_threads(1)
X = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(0))


def model_of(*blocks: Block, **given: Any) -> Any:
    case = Case(model=Model(width=6, blocks=blocks, **given))
    check(case)
    return build_model(case)


def test_recurrent_is_a_gru_by_its_equations() -> None:
    for bias in (True, False):
        block = model_of(Block(kind="recurrent", bias=bias)).blocks[0]
        gru = block.gru
        h = torch.zeros(3, 6)
        outputs = []
        for t in range(5):
            given = F.linear(X[:, t], gru.weight_ih_l0, gru.bias_ih_l0 if bias else None)
            held = F.linear(h, gru.weight_hh_l0, gru.bias_hh_l0 if bias else None)
            (ir, iz, i_n), (hr, hz, hn) = given.chunk(3, 1), held.chunk(3, 1)
            reset, update = torch.sigmoid(ir + hr), torch.sigmoid(iz + hz)
            h = (1 - update) * torch.tanh(i_n + reset * hn) + update * h
            outputs.append(h)
        assert torch.allclose(block(X), torch.stack(outputs, 1), atol=1e-6)


def test_a_gru_computes_with_the_parameters_that_it_shows() -> None:
    """It keeps a list of them, which transposing and moving must keep up to date."""
    for stored in (False, True):
        gru = model_of(Block(kind="recurrent", transposed=stored)).blocks[0].gru
        for name, kept in zip(gru._flat_weights_names, gru._flat_weights, strict=True):
            assert kept is getattr(gru, name)
        assert gru.weight_ih_l0.is_contiguous() is not stored
        before = gru(X)
        gru.weight_hh_l0.data = gru.weight_hh_l0.data * 2
        assert not torch.equal(gru(X), before)


@pytest.mark.parametrize("kind", ["attention", "experts"])
def test_strides_of_the_input_do_not_matter(kind: Any) -> None:
    """cuDNN gives the output of a convolution strides of its own."""
    block = model_of(Block(kind=kind)).blocks[0]
    x = X
    other = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert other.stride() != x.stride()
    torch.testing.assert_close(block(x), block(other))


def test_every_token_goes_to_its_best_expert() -> None:
    block = model_of(Block(kind="experts", experts=3, hidden=7)).blocks[0]
    experts = block.experts
    shares = torch.softmax(F.linear(X, experts.weight, experts.bias), -1)
    expected = torch.zeros_like(X)
    for row in range(3):
        for column in range(5):
            best = int(shares[row, column].argmax())
            one = experts.mlps[best](X[row, column])
            expected[row, column] = one * shares[row, column, best]
    assert torch.allclose(block(X), expected, atol=1e-6)


def test_an_expert_without_tokens_has_no_gradient() -> None:
    model = model_of(Block(kind="experts", experts=4, hidden=3))
    model(torch.randn(1, 1, 8)).sum().backward()
    there = [
        {p.grad is not None for p in expert.parameters()} for expert in model.blocks[0].experts.mlps
    ]
    assert sorted(map(list, there)) == [[False], [False], [False], [True]]
    assert bool(model.blocks[0].experts.weight.grad.any()), "the router has a gradient"


def test_routing_differs_between_ranks_and_microbatches() -> None:
    case = Case(
        mesh=(4,),
        model=Model(width=6, blocks=(Block(kind="experts", experts=4),)),
        data=Data(batch=1, length=2),
    )
    model = build_model(case)
    used = set()
    for rank in range(4):
        for number in range(2):
            model.zero_grad()
            model(*batch(case, step=0, rank=rank, microbatch=number).inputs).sum().backward()
            mlps: Any = model.blocks[0].experts.mlps  # type: ignore[union-attr]
            used.add(tuple(mlp.up.weight.grad is not None for mlp in mlps))
    assert len(used) > 1


def test_the_second_input_is_there_sometimes() -> None:
    case = Case(mesh=(4,), model=Model(side=True))
    counts = [
        len(batch(case, step=step, rank=rank, microbatch=0).inputs)
        for step in range(50)
        for rank in range(4)
    ]
    assert set(counts) == {1, 2}
    assert 70 <= counts.count(2) <= 130
    model = build_model(case)
    assert model.side is not None
    x, side = torch.randn(2, 3, 8), torch.randn(2, 3, 3)
    assert torch.allclose(model(x, side), model.head(model.stem(x) + model.side(side)))
    without = merged(case, {"model": {"side": False}}, source="test")
    one, other = (batch(c, step=0, rank=1, microbatch=0) for c in (case, without))
    assert torch.equal(one.inputs[0], other.inputs[0]), "the first input stays the same"


def test_gain_and_adapter() -> None:
    plain = model_of(Block(kind="mlp", residual=True)).blocks[0]
    block = model_of(Block(kind="mlp", residual=True, gain=True, empty=True)).blocks[0]
    missing = block.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing == ["gain", "narrow.weight", "widen.weight"]
    assert torch.allclose(block(X) - X, block.gain * (plain(X) - X), atol=1e-6)
    block(X).sum().backward()
    assert block.gain.shape == block.gain.grad.shape == ()
    assert block.narrow.weight.grad.shape == (0, 6)
    assert block.widen.weight.grad.shape == (6, 0)


@pytest.mark.parametrize("kind", ["mlp", "attention", "recurrent", "experts"])
def test_transposed_computes_the_same(kind: Any) -> None:
    plain = model_of(Block(kind=kind)).blocks[0]
    block = model_of(Block(kind=kind, transposed=True)).blocks[0]
    block.load_state_dict(plain.state_dict())
    matrices = [p for p in block.parameters() if p.dim() == 2]
    assert matrices
    assert not any(matrix.is_contiguous() for matrix in matrices)
    assert torch.allclose(block(X), plain(X), atol=1e-6)


@pytest.mark.parametrize("kind", ["mlp", "attention", "recurrent", "experts", "layer_norm"])
def test_a_checkpoint_replays_dropout_and_keeps_nothing(kind: Any) -> None:
    results = []
    for asked in (False, True):
        block = model_of(Block(kind=kind, dropout=0.4, checkpoint=asked)).blocks[0]
        calls: list[torch.Size] = []
        block.dropout.register_forward_pre_hook(
            lambda _, given, to=calls: to.append(given[0].shape)
        )
        saved: list[int] = []
        x = X.clone().requires_grad_()
        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, to=saved: to.append(1) or t,  # type: ignore[func-returns-value]
            lambda t: t,
        ):
            y = block(x)
        y.square().sum().backward()
        results.append((y, x.grad, *(p.grad for p in block.parameters())))
        assert len(calls) == 1 + asked, "the forward runs once more in the backward"
        assert (len(saved) <= 1) is asked, "nothing but the input is kept"
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_start_in_mid_training_has_all_shapes() -> None:
    blocks = (Block(kind="recurrent", gain=True, empty=True, transposed=True),)
    case = Case(model=Model(blocks=blocks), start=Start(step=3, moments="typical"))
    model = build_model(case)
    state = initial_state(case, model)
    assert state is not None
    for name, parameter in model.named_parameters():
        for role in ("parameter", "exp_avg", "exp_avg_sq"):
            assert state[name, role].shape == parameter.shape
    assert float(state["blocks.0.gain", "parameter"]) != 0
    assert bool((state["blocks.0.gru.bias_hh_l0", "parameter"].abs() <= 0.5).all())
