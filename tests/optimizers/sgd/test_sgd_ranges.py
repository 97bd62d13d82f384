"""A gradient that is recovered is the one that was given, and hidden buffers are enclosed."""

from __future__ import annotations

import pytest
import torch
from sgd_steps import FORMS, KERNELS, SGD, options_of, scalars, step

from zerocheck.case.schema import Group
from zerocheck.floating_point import Format
from zerocheck.judge.compare import compare
from zerocheck.optimizers.specification import Interval

SIZE = 512 + 13


def _drawn(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.empty(SIZE).normal_(generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("momentum", "nesterov"), FORMS)
def test_the_gradient_that_was_given(
    momentum: float, nesterov: bool, kernel: str, dtype: torch.dtype
) -> None:
    # Of more elements in bf16 torch's fused kernel stores none: reports/findings.
    size = 15 if (kernel, dtype) == ("fused", torch.bfloat16) else SIZE
    p, g, b = (one[:size] for one in _drawn(3, dtype))
    group, options = Group(lr=0.1, weight_decay=0.1), options_of(momentum, nesterov=nesterov)
    after, buffer = step(p, g, b if momentum else None, group, options, kernel)
    old = {"parameter": p.double(), "momentum_buffer": b.double()}
    new = {"parameter": after.double()}
    if buffer is not None:
        new["momentum_buffer"] = buffer.double()
    found, error = SGD.recovered(old, new, scalars(group, options), Format.of(dtype))
    assert bool(((found - g.double()).abs() <= error).all())
    # What is off by a hundredth is seen, in fp32 with momentum by a millionth.
    size = 1e-6 if momentum else 1e-4
    assert bool((error < (size if dtype == torch.float32 else 0.6) * 4).all())


def test_without_a_rate_nothing_is_known() -> None:
    p = torch.ones(2, dtype=torch.float64)
    s = scalars(Group(lr=0.0), options_of(0.0, nesterov=False))
    held = {"parameter": p}
    assert bool(SGD.recovered(held, held, s, Format.of(torch.float32)).error.isinf().all())


@pytest.mark.parametrize(("momentum", "nesterov"), FORMS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_three_steps_of_a_hidden_buffer(momentum: float, nesterov: bool, kernel: str) -> None:
    group, options = Group(lr=0.05, weight_decay=0.1), options_of(momentum, nesterov=nesterov)
    s = scalars(group, options)
    p, *gradients = (*_drawn(4), *_drawn(5)[:1])
    zero = torch.zeros(SIZE, dtype=torch.float64)
    hidden = {"momentum_buffer": Interval(zero, zero)}
    off = torch.full((SIZE,), 2.0**-20, dtype=torch.float64)
    buffer = None
    for number, g in enumerate(gradients):
        # The gradient is known up to `off`; the one that is given lies at the end of that.
        known = Interval(g.double() - off * (-1) ** number, off)
        after, buffer = step(p, g, buffer, group, options, kernel)
        share, misfit = compare(after.double(), SGD.range(p.double(), hidden, known, s))
        assert misfit is None, (number, share)
        wrong = after.double() * (1 + 2.0**-10)
        assert compare(wrong, SGD.range(p.double(), hidden, known, s))[1] is not None
        hidden = SGD.hidden_after(p.double(), hidden, known, s)
        if buffer is not None:
            middle, error = hidden["momentum_buffer"]
            assert bool(((buffer.double() - middle).abs() <= error).all())
        p = after
