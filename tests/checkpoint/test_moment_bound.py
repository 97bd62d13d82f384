"""The bound on exp_avg: every run of torch's AdamW obeys it, and it is attained."""

from __future__ import annotations

import math

import pytest
import torch

from zerocheck.checkpoint.moment_bound import largest

BETAS = [
    (0.9, 0.999),
    (0.9, 0.95),
    (0.95, 0.9),
    (0.0, 0.99),
    (0.5, 0.25),
    (0.99, 0.9999),
    (0.9, 0.0),
]


def moments(
    gradients: torch.Tensor, betas: tuple[float, float], **options: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """exp_avg and exp_avg_sq after one step for each row of gradients."""
    parameter = torch.nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=betas, **options)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    held = optimizer.state[parameter]
    return held["exp_avg"], held["exp_avg_sq"]


def worst(betas: tuple[float, float], steps: int) -> torch.Tensor:
    """Gradients for which Cauchy-Schwarz is an equality: (b1 / b2)^k, oldest first."""
    ratio = betas[0] / betas[1] if betas[1] else 0.0
    return torch.tensor([ratio ** (steps - 1 - step) for step in range(steps)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_adamw_obeys_it(dtype: torch.dtype, form: dict[str, bool]) -> None:
    scales = torch.logspace(-30, 6, 73)
    judged = 0
    for betas in BETAS:
        for steps in (1, 2, 3, 40):
            torch.manual_seed(steps)
            random = torch.randn(steps, 73) * scales
            attaining = worst(betas, steps)[:, None] * scales
            gradients = torch.cat([random, attaining], dim=1).clamp(-200, 200).to(dtype)
            m, v = moments(gradients, betas, **form)
            bound = largest(v, betas, steps)
            if bound is not None:
                fine = torch.isfinite(v) & torch.isfinite(m)
                assert not ((m.double().abs() > bound) & fine).any(), (betas, steps)
                judged += int(fine.sum())
    assert judged > 2000


@pytest.mark.parametrize("betas", BETAS[:3])
@pytest.mark.parametrize("steps", [1, 3, 40])
def test_it_is_attained(betas: tuple[float, float], steps: int) -> None:
    """Within the roundings that it allows for: some 100 units of them in fp32."""
    m, v = moments(worst(betas, steps)[:, None], betas)
    bound = largest(v, betas, steps)
    assert bound is not None
    slack = float(bound / m.abs()) - 1
    assert 0 <= slack < 2e-3
    exact, squares = moments(worst(betas, steps)[:, None].double(), betas)
    sharp = largest(squares, betas, steps)
    assert sharp is not None and float(sharp / exact.abs()) - 1 < 1e-3


def test_a_step_count_that_was_set_back_is_seen() -> None:
    """Equal gradients over 100 steps are too large for the first step."""
    m, v = moments(torch.ones(100, 1), (0.9, 0.999))
    after, first = (largest(v, (0.9, 0.999), step) for step in (100, 1))
    assert after is not None and first is not None
    assert float(first) < float(m) < float(after)


def test_no_bound_where_there_is_none() -> None:
    v = torch.ones(3)
    assert largest(v, (0.9, 1 - 2.0**-30), 10) is None  # nothing comes into exp_avg_sq in fp32
    assert largest(v, (0.99, 0.5), 1e6) is None  # it forgets faster than exp_avg
    bound = largest(v, (0.9, 0.999), 1e9)
    assert bound is not None and math.isclose(float(bound[0]), 7.27, rel_tol=1e-2)
