"""The Muon of the reference against torch's own, and what it refuses."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from zerocheck_reference import (
    AdamWOptions,
    Adjustment,
    Group,
    MuonOptions,
    MuonState,
    SGDState,
    Trainer,
    adjusted,
    muon_step,
    orthogonalized,
)

SHAPES = ((3, 5), (8, 8), (16, 4), (1, 7), (7, 1), (1, 1), (32, 64), (48, 13))
ADJUSTMENTS: tuple[Adjustment, ...] = ("original", "match_rms_adamw")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_three_steps_are_those_of_torch(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    for nesterov, adjustment, decay in itertools.product((True, False), ADJUSTMENTS, (0.0, 0.1)):
        start, *gradients = (torch.empty(shape).normal_(generator=generator) for _ in range(4))
        options = MuonOptions(lr=0.01, weight_decay=decay, nesterov=nesterov, adjustment=adjustment)
        parameter = nn.Parameter(start.clone())
        optimizer = torch.optim.Muon(
            [parameter], lr=0.01, weight_decay=decay, nesterov=nesterov, adjust_lr_fn=adjustment
        )
        state = options.initial(start)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
            before = state.copy()
            after = muon_step(state, gradient, options)
            assert torch.equal(state.parameter, before.parameter)
            # From the same state bits agree: Newton-Schulz does not round otherwise.
            held = optimizer.state[parameter]["momentum_buffer"]
            assert torch.equal(after.momentum_buffer, held)
            torch.testing.assert_close(after.parameter, parameter.detach(), rtol=2e-7, atol=1e-8)
            state = MuonState(parameter.detach().clone(), held.clone())


def test_singular_values_come_near_1_and_vectors_stay() -> None:
    generator = torch.Generator().manual_seed(1)
    matrix = torch.empty(12, 20, dtype=torch.float64).normal_(generator=generator)
    made = orthogonalized(matrix, steps=10, dtype=torch.float64)
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    mine = u.T @ made @ v.T
    assert bool(((torch.diagonal(mine) > 0.6) & (torch.diagonal(mine) < 1.3)).all()), values
    assert float((mine - torch.diag(torch.diagonal(mine))).abs().max()) < 1e-9


def test_a_stack_is_orthogonalized_matrix_by_matrix() -> None:
    generator = torch.Generator().manual_seed(2)
    stack = torch.empty(3, 6, 4, dtype=torch.float64).normal_(generator=generator)
    each = torch.stack([orthogonalized(one, dtype=torch.float64) for one in stack])
    torch.testing.assert_close(orthogonalized(stack, dtype=torch.float64), each)
    after = muon_step(MuonState(stack, torch.zeros_like(stack)), stack, MuonOptions())
    assert after.parameter.shape == stack.shape


def test_the_factor_follows_the_shape() -> None:
    assert adjusted((16, 4), "original") == 2.0
    assert adjusted((4, 16), "original") == 1.0
    assert adjusted((4, 16), "match_rms_adamw") == pytest.approx(0.8)


def test_it_trains_beside_another_optimizer() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    trainer = Trainer(
        model,
        [
            Group(names=("weight",), options=MuonOptions(lr=0.1)),
            Group(names=("bias",), options=AdamWOptions(lr=0.1)),
        ],
    )
    batch = torch.ones(2, 4)
    before = [one.detach().clone() for one in model.parameters()]
    trainer.step([[lambda module: module(batch).square().mean()]])
    for old, new in zip(before, model.parameters(), strict=True):
        assert bool((new.detach() != old).any())


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="momentum"):
        MuonOptions(momentum=1.0)
    with pytest.raises(ValueError, match=r"adjustment is 'moonshot' .*match_rms_adamw"):
        MuonOptions(adjustment="moonshot")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ns_steps is 0"):
        MuonOptions(ns_steps=0)
    with pytest.raises(ValueError, match="ns_steps is True"):
        MuonOptions(ns_steps=True)
    with pytest.raises(ValueError, match="has 1 dims"):
        MuonOptions().initial(torch.ones(3))
    with pytest.raises(ValueError, match=r"torch\.int64"):
        MuonOptions().initial(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="momentum_buffer is"):
        muon_step(MuonState(torch.ones(2, 2), torch.ones(2, 3)), torch.ones(2, 2), MuonOptions())
    with pytest.raises(ValueError, match=r"gradient is torch\.float64"):
        muon_step(MuonOptions().initial(torch.ones(2, 2)), torch.ones(2, 2).double(), MuonOptions())
    with pytest.raises(ValueError, match="SGDState"):
        MuonOptions().check(SGDState(torch.ones(2, 2)))
