"""The range of an update with hidden moments holds every update in the box, and no more."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from zerocheck.optimizers.adamw import bounds as adamw
from zerocheck.optimizers.adamw.ranges import Box, moments_after, parameter_after, update_range

SAMPLES = 2000


def _scalars(step: int, eps: float) -> adamw.Scalars:
    return adamw.scalars(
        lr=1e-2, beta1=0.9, beta2=0.999, eps=eps, weight_decay=0.1, step=step, reading="double"
    )


def _one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


@given(
    st.floats(-1, 1),
    st.floats(0, 0.1),
    st.floats(0, 1),
    st.floats(0, 0.1),
    st.floats(-1, 1),
    st.floats(0, 2),
    st.sampled_from([1, 2, 300]),
    st.sampled_from([1e-8, 1e-3]),
    st.integers(0, 1 << 30),
)
def test_every_update_in_the_box_is_in_the_range(
    m: float,
    m_e: float,
    v: float,
    v_e: float,
    g: float,
    g_e: float,
    step: int,
    eps: float,
    seed: int,
) -> None:
    s = _scalars(step, eps)
    low, high = update_range(Box(*map(_one, (m, m_e, v, v_e, g, g_e))), s)
    random = torch.Generator().manual_seed(seed)

    def within(middle: float, error: float, least: float = -torch.inf) -> torch.Tensor:
        part = torch.rand(SAMPLES, generator=random, dtype=torch.float64) * 2 - 1
        return (middle + part * error).clamp(min=least)

    ms, vs, gs = within(m, m_e), within(v, v_e, 0.0), within(g, g_e)
    new_m = s.beta1 * ms + (1 - s.beta1) * gs
    new_v = s.beta2 * vs + (1 - s.beta2) * gs * gs
    update = s.lr / s.correction1 * new_m / ((new_v / s.correction2).sqrt() + s.eps)
    slack = 1e-9 * update.abs().max()
    assert bool((update >= low - slack).all()) and bool((update <= high + slack).all())


def test_a_first_step_of_a_small_gradient_has_a_narrow_range() -> None:
    """Dividing the intervals of m and v would give [1/3, 3] times the learning rate."""
    zero = _one(0.0)
    box = Box(zero, zero, zero, zero, _one(2e-3), _one(1e-3))
    low, high = update_range(box, _scalars(1, 1e-8))
    assert 0.99e-2 < float(low) <= float(high) < 1.01e-2


def test_the_stationary_point_is_in_the_range() -> None:
    """Between the ends of g the update is larger than at either."""
    box = Box(_one(0.1), _one(0.0), _one(1e-4), _one(0.0), _one(0.0), _one(1.0))
    s = _scalars(300, 1e-8)
    _, high = update_range(box, s)
    ends = [
        float(update_range(box._replace(g=_one(g), g_error=_one(0.0)), s)[1]) for g in (-1.0, 1.0)
    ]
    assert float(high) > 1.05 * max(ends)


def test_moments_and_parameters_enclose_torchs_adamw() -> None:
    random = torch.Generator().manual_seed(3)
    start = torch.randn(512, generator=random)
    parameter = torch.nn.Parameter(start.clone())
    adamw = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1)
    zeros = torch.zeros(512, dtype=torch.float64)
    box = Box(zeros, zeros, zeros, zeros, zeros, zeros)
    for step in range(1, 6):
        gradient = torch.randn(512, generator=random) * 10.0 ** -torch.arange(512).remainder(9)
        parameter.grad, before = gradient.clone(), parameter.detach().double().clone()
        adamw.step()
        s = _scalars(step, 1e-8)
        box = box._replace(g=gradient.double())
        middle, bound = parameter_after(before, *update_range(box, s), s)
        assert bool(((parameter.detach().double() - middle).abs() <= bound).all())
        (m, m_error), (v, v_error) = moments_after(box, s)
        state = adamw.state[parameter]
        assert bool(((state["exp_avg"].double() - m).abs() <= m_error).all())
        assert bool(((state["exp_avg_sq"].double() - v).abs() <= v_error).all())
        box = Box(m, m_error, v, v_error, zeros, zeros)
