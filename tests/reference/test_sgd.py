"""The SGD of the reference against torch's own in float64, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zerocheck_reference import AdamWOptions, AdamWState, Group, SGDOptions, SGDState, Trainer
from zerocheck_reference import sgd_step as step

SIZE = 64
OPTIONS = [
    SGDOptions(lr=0.1, momentum=momentum, weight_decay=decay, nesterov=nesterov, maximize=maximize)
    for momentum, nesterov in ((0.0, False), (0.9, False), (0.9, True))
    for decay in (0.0, 0.1)
    for maximize in (False, True)
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_three_steps_are_those_of_torch(options: SGDOptions) -> None:
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (
        torch.empty(SIZE, dtype=torch.float64).normal_(generator=generator) for _ in range(4)
    )
    parameter = nn.Parameter(start.clone())
    optimizer = torch.optim.SGD(
        [parameter],
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        nesterov=options.nesterov,
        maximize=options.maximize,
        foreach=False,
    )
    state = options.initial(start)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        before = state.copy()
        after = step(state, gradient, options)
        assert torch.equal(state.parameter, before.parameter)
        state = after
        torch.testing.assert_close(state.parameter, parameter.detach(), rtol=1e-13, atol=1e-15)
        buffer = optimizer.state[parameter].get("momentum_buffer")
        assert (buffer is None) == (state.momentum_buffer is None)
        if buffer is not None:
            torch.testing.assert_close(state.momentum_buffer, buffer, rtol=1e-13, atol=1e-15)


def test_the_first_buffer_is_the_gradient_and_shares_no_memory() -> None:
    p, g = torch.ones(3), torch.full((3,), 0.5)
    after = step(SGDState(p), g, SGDOptions(momentum=0.9))
    assert after.momentum_buffer is not None and torch.equal(after.momentum_buffer, g)
    after.momentum_buffer.zero_()
    assert bool((g == 0.5).all())


def test_a_copy_has_the_buffer_and_shares_no_memory() -> None:
    state = SGDState(torch.ones(3), torch.full((3,), 0.5))
    copy = state.copy()
    assert copy.momentum_buffer is not None and copy.momentum_buffer.tolist() == [0.5] * 3
    copy.parameter.zero_()
    copy.momentum_buffer.zero_()
    assert bool((state.parameter == 1).all()) and bool((state.momentum_buffer == 0.5).all())  # type: ignore[union-attr]
    assert SGDState(torch.ones(3)).copy().momentum_buffer is None


def test_what_is_refused() -> None:
    for given in ({"lr": -1.0}, {"momentum": 1.0}, {"nesterov": True}, {"weight_decay": -0.1},
                  {"momentum": 0.9, "nesterov": 1}, {"maximize": "yes"}):  # fmt: skip
        with pytest.raises(ValueError, match="allowed"):
            SGDOptions(**given)  # type: ignore[arg-type]
    p = torch.ones(3)
    plain, heavy = SGDOptions(), SGDOptions(momentum=0.9)
    for state, gradient, options in (
        (SGDState(p, p), p, plain),
        (SGDState(p, torch.ones(2)), p, heavy),
        (SGDState(p, p.double()), p, heavy),
        (SGDState(torch.ones(3, dtype=torch.int64)), p, plain),
        (SGDState(p), torch.ones(2), plain),
        (SGDState(p), p.double(), plain),
    ):
        with pytest.raises(ValueError, match="allowed"):
            step(state, gradient, options)
    adamw = AdamWOptions().initial(p)
    assert isinstance(adamw, AdamWState)
    with pytest.raises(ValueError, match="the state is AdamWState"):
        plain.check(adamw)
    with pytest.raises(ValueError, match="the state is SGDState"):
        AdamWOptions().check(SGDState(p))


def test_the_trainer_takes_its_steps() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    options = SGDOptions(lr=0.5, momentum=0.5)
    trainer = Trainer(model, [Group(names=("weight",), options=options)])
    one = torch.ones(1, 2)
    for _ in range(2):  # the gradient is 1 in each
        trainer.step([[lambda m: m(one).sum()]])
    assert torch.equal(model.weight.detach(), torch.full((1, 2), 1.0 - 0.5 - 0.75))
