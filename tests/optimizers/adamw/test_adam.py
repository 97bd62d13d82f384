"""Adam, whose decay is added to the gradient: its reference, and what is recovered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_steps import SIZE, fourth_step, vector

from zerocheck.case.schema import Group, Optimizer
from zerocheck.judge.compare import compare
from zerocheck.optimizers import OPTIMIZERS
from zerocheck.optimizers.specification import Interval, UpdateElements, UpdateRule
from zerocheck_reference import AdamWState

ADAM: UpdateRule = OPTIMIZERS["adam"]  # type: ignore[assignment]
PLAIN = Optimizer(kind="adam")
OLD = {"exp_avg": vector(8), "exp_avg_sq": vector(9).abs()}
"""States of mid-training."""


def scalars(group: Group) -> Any:
    return ADAM.scalars(group, PLAIN, lr=group.lr, step=4, reading="double")


@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_the_middle_is_the_reference_in_float64(decay: float) -> None:
    group = Group(lr=0.1, weight_decay=decay)
    p, g = vector(1), vector(2)
    old = {name: state.double() for name, state in OLD.items()}
    state = AdamWState(p.double(), old["exp_avg"], old["exp_avg_sq"], step=3)
    right: Any = ADAM.reference_options(group, PLAIN).after(state, g.double())
    new = {"exp_avg": right.exp_avg, "exp_avg_sq": right.exp_avg_sq}
    elements = UpdateElements(p.double(), g.double(), old, new)
    for role, enclosure in ADAM.enclosures(elements, scalars(group)):
        torch.testing.assert_close(enclosure.exact, getattr(right, role), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_the_gradient_is_recovered(decay: float) -> None:
    group = Group(lr=0.1, beta1=0.9, beta2=0.95, weight_decay=decay)
    p, g = vector(1), vector(2)
    elements, observed = fourth_step(PLAIN, group, OLD, p=p, g=g)
    old = {**elements.old, "parameter": p.double()}
    found = ADAM.recovered(old, observed, scalars(group), elements.format)
    off = (found.middle - g.double()).abs()
    assert bool((off <= found.error).all())
    assert float(found.error.max()) < 1e-4


@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_hidden_moments_are_enclosed(decay: float) -> None:
    group = Group(lr=0.1, beta1=0.9, beta2=0.95, weight_decay=decay)
    p, g = vector(1), vector(2)
    elements, observed = fourth_step(PLAIN, group, OLD, p=p, g=g)
    hidden = {n: Interval(s, torch.zeros_like(s)) for n, s in elements.old.items()}
    gradient = Interval(g.double(), torch.zeros(SIZE, dtype=torch.float64))
    after = ADAM.hidden_after(p.double(), hidden, gradient, scalars(group))
    for role, (middle, error) in after.items():
        assert bool(((observed[role] - middle).abs() <= error).all()), role
    made = ADAM.range(p.double(), hidden, gradient, scalars(group))
    assert compare(observed["parameter"], made)[1] is None
    wrong = fourth_step(PLAIN, group, OLD, p=p, g=g, kind=torch.optim.AdamW)[1]["parameter"]
    assert (compare(wrong, made)[1] is None) == (decay == 0)


def test_decoupled_decay_is_another_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    for decay, words in ((0.5, "applies its weight decay of 0.5 apart"), (0.0, "")):
        optimizer = torch.optim.Adam([parameter], weight_decay=decay, decoupled_weight_decay=True)
        assert words in ADAM.foreign_option(optimizer, optimizer.param_groups[0])
        assert bool(words) == bool(ADAM.foreign_option(optimizer, optimizer.param_groups[0]))
