"""Schedules against their closed forms, and against torch.optim.lr_scheduler."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerocheck_reference import constant, cosine, linear_warmup

plans = st.tuples(st.integers(0, 40), st.integers(1, 40)).map(lambda x: (x[0], x[0] + x[1]))


def test_values() -> None:
    assert [constant()(i) for i in (0, 1, 10**6)] == [1.0, 1.0, 1.0]
    assert [linear_warmup(3, 7)(i) for i in range(9)] == [0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0, 0]
    assert [linear_warmup(0, 2)(i) for i in range(3)] == [1.0, 0.5, 0.0]
    assert [cosine(1, 3)(i) for i in (0, 1, 3, 9)] == [0.5, 1.0, 0.0, 0.0]
    assert cosine(1, 3)(2) == pytest.approx(0.5, abs=2.0**-52)


@settings(deadline=None, derandomize=True)
@given(plans)
def test_never_zero_inside_one_at_the_top_and_down_from_there(plan: tuple[int, int]) -> None:
    warmup, total = plan
    for make in (linear_warmup, cosine):
        factors = [make(warmup, total)(i) for i in range(total + 2)]
        assert all(0.0 < f <= 1.0 for f in factors[:total])
        assert factors[warmup] == 1.0 and factors[total:] == [0.0, 0.0]
        assert factors[: warmup + 1] == sorted(factors[: warmup + 1])
        assert factors[warmup:] == sorted(factors[warmup:], reverse=True)


def test_cosine_is_that_of_torch() -> None:
    """torch multiplies its way from step to step: 4 roundings a step of factors up to 1."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    ours = cosine(0, 20)
    for step in range(20):
        exact = 0.5 * (1 + math.cos(math.pi * step / 20))
        assert abs(ours(step) - exact) <= 2.0**-51
        assert abs(float(theirs.get_last_lr()[0]) - ours(step)) <= (step + 1) * 2.0**-48
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("make", [linear_warmup, cosine])
def test_refusals(make: type) -> None:
    with pytest.raises(ValueError, match=r"warmup is 5 .*less than total, which is 5"):
        make(5, 5)
    for bad in ((-1, 5), (1.5, 5), (0, 0)):
        with pytest.raises(ValueError, match="an int of at least"):
            make(*bad)
    for schedule in (make(1, 2), constant()):
        for step in (-1, 0.5, True):
            with pytest.raises(ValueError, match="step is"):
                schedule(step)  # type: ignore[arg-type]
