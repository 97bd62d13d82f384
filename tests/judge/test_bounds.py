"""Every bound encloses what torch's kernels really do, and is nearly attained by them."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from zerocheck.floating_point import ETA, Enclosure, U
from zerocheck.judge import bounds
from zerocheck.judge.compare import compare
from zerocheck.optimizers.adamw import bounds as adamw

STEPS = (1, 2, 3, 256, 10_001)
OPTIONS = (
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
    {"lr": 1e-2, "betas": (0.5, 0.95), "eps": 1e-3, "weight_decay": 0.0},
    {"lr": 3e-5, "betas": (0.0, 0.9999), "eps": 1e-6, "weight_decay": 0.5},
)
KERNELS = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
SIZE = 4096


def _normal(generator: torch.Generator, scale: float) -> torch.Tensor:
    return torch.empty(SIZE).normal_(generator=generator) * scale


def _share(observed: torch.Tensor, enclosure: Enclosure) -> float:
    share, misfit = compare(observed, enclosure)
    assert misfit is None, f"outside by {share}"
    return share


@pytest.fixture(scope="module")
def shares() -> dict[str, float]:
    """The largest share of each bound over all kernels, options and start steps."""
    found = {"exp_avg": 0.0, "exp_avg_sq": 0.0, "parameter": 0.0}
    generator = torch.Generator().manual_seed(1)
    for kernel in KERNELS.values():
        for options in OPTIONS:
            for step in STEPS:
                for scale in (1.0, 1e-6, 1e-20, 1e6):
                    p, g = _normal(generator, 1.0), _normal(generator, scale)
                    m = _normal(generator, scale) if step > 1 else torch.zeros(SIZE)
                    v = (_normal(generator, scale) ** 2) if step > 1 else torch.zeros(SIZE)
                    q = p.clone().requires_grad_()
                    q.grad = g.clone()
                    optimizer = torch.optim.AdamW([q], **options, **kernel)
                    optimizer.state[q] = {
                        "step": torch.tensor(float(step - 1)),
                        "exp_avg": m.clone(),
                        "exp_avg_sq": v.clone(),
                    }
                    optimizer.step()
                    after = optimizer.state[q]
                    s = adamw.scalars(
                        lr=options["lr"],
                        beta1=options["betas"][0],
                        beta2=options["betas"][1],
                        eps=options["eps"],
                        weight_decay=options["weight_decay"],
                        step=step,
                        reading="double",
                    )
                    m1, v1 = after["exp_avg"].double(), after["exp_avg_sq"].double()
                    seen = {
                        "exp_avg": (m1, adamw.exp_avg(m.double(), g.double(), s)),
                        "exp_avg_sq": (v1, adamw.exp_avg_sq(v.double(), g.double(), s)),
                        "parameter": (q.detach().double(), adamw.parameter(p.double(), m1, v1, s)),
                    }
                    for name, (observed, enclosure) in seen.items():
                        found[name] = max(found[name], _share(observed, enclosure))
    return found


def test_update_bounds_enclose_every_kernel_of_torch(
    shares: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print("\nlargest share of each bound:", {k: round(v, 3) for k, v in shares.items()})
    assert all(share <= 1.0 for share in shares.values())


def test_update_bounds_are_not_slack(shares: dict[str, float]) -> None:
    # A bound twice as wide as any kernel needs would hide half of what it could show.
    assert all(share > 0.5 for share in shares.values())


@pytest.mark.parametrize("terms", [2, 3, 5, 16])
@pytest.mark.parametrize("order", ["rank", "tree", "reverse"])
def test_gradient_bound_encloses_every_order_of_summation(terms: int, order: str) -> None:
    generator = torch.Generator().manual_seed(terms)
    parts = torch.randn(terms, SIZE, generator=generator)
    wide = parts.double()
    enclosure = bounds.gradient(
        wide.sum(0) / terms,
        wide.abs().sum(0) / terms,
        bounds.gradient_roundings(
            world_size=terms, microbatches=1, average="mean", divide="loss", accumulate="local"
        ),
    )
    rows = list(parts if order != "reverse" else parts.flip(0))
    while len(rows) > 1:
        if order == "tree":
            rows = [sum(rows[i : i + 2][1:], rows[i]) for i in range(0, len(rows), 2)]
        else:
            rows = [rows[0] + rows[1], *rows[2:]]
    for divided in (rows[0] / terms, rows[0] * torch.tensor(1 / terms)):
        assert _share(divided, enclosure) <= 1.0
    # Divided before the sum, as DDP does.
    early = (parts * torch.tensor(1 / terms)).sum(0)
    assert _share(early, enclosure) <= 1.0


def test_gradient_bound_of_two_ranks_is_attained() -> None:
    # One rounding: half a unit in the last place of the sum is all that can happen.
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(2, 1 << 16, generator=generator)
    wide = parts.double()
    enclosure = bounds.gradient(wide.sum(0) / 2, wide.abs().sum(0) / 2, 1)
    assert _share((parts[0] + parts[1]) / 2, enclosure) > 0.9


@pytest.mark.parametrize(
    ("given", "roundings"),
    [
        ({"world_size": 1, "microbatches": 1}, 0),
        ({"world_size": 2, "microbatches": 1}, 1),
        ({"world_size": 3, "microbatches": 1}, 4),
        ({"world_size": 4, "microbatches": 3}, 5),
        ({"world_size": 3, "microbatches": 2, "average": "sum"}, 3),
        ({"world_size": 2, "microbatches": 3, "divide": "gradient"}, 5),
        ({"world_size": 3, "microbatches": 2, "accumulate": "reduce_each"}, 9),
    ],
)
def test_roundings_on_the_path_of_one_term(given: dict, roundings: int) -> None:
    defaults = {"average": "mean", "divide": "loss", "accumulate": "local"}
    assert bounds.gradient_roundings(**(defaults | given)) == roundings


def test_one_rank_and_one_microbatch_leave_no_room_at_all() -> None:
    g = torch.randn(100, generator=torch.Generator().manual_seed(0)).double()
    enclosure = bounds.gradient(g, g.abs(), 0)
    assert compare(g.float(), Enclosure(g.float().double(), enclosure.bound))[1] is None
    off = g.float().clone()
    off[7] = torch.nextafter(off[7], torch.tensor(2.0))
    assert compare(off, Enclosure(g.float().double(), enclosure.bound))[1] is not None


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 100_000])
def test_norm_bound_encloses_torch_and_a_plain_loop(size: int) -> None:
    g = torch.randn(size, generator=torch.Generator().manual_seed(size))
    exact = (
        math.sqrt(sum(Fraction(float(x)) ** 2 for x in g[:1000]))
        if size <= 1000
        else float(torch.linalg.vector_norm(g, dtype=torch.float64))
    )
    bound = bounds.norm_relative(size) * exact
    whole = float(torch.linalg.vector_norm(g))
    split = float(torch.stack([torch.linalg.vector_norm(part) for part in g.split(97)]).norm())
    serial = float(torch.cumsum(g * g, 0)[-1].sqrt())
    assert all(abs(norm - exact) <= bound for norm in (whole, split, serial))


@pytest.mark.parametrize("norm", [0.3, 1.0000001, 7.5, 3e4])
def test_clip_bound_encloses_torch_and_sees_eight_units(norm: float) -> None:
    g = torch.randn(SIZE, generator=torch.Generator().manual_seed(2))
    reported = torch.tensor(norm)
    coefficient = torch.clamp(1.0 / (reported + 1e-6), max=1.0)
    exact = min(1.0, 1.0 / (float(reported) + 1e-6))
    enclosure = bounds.clipped(g.double(), exact)
    assert _share(g * coefficient, enclosure) <= 1.0
    assert compare(g * (coefficient * (1 + 16 * U)), enclosure)[1] is not None


def test_single_reading_encloses_hyperparameters_in_fp32() -> None:
    step, lr, beta1, beta2, eps = 3, 1e-3, 0.9, 0.999, 1e-8
    generator = torch.Generator().manual_seed(4)
    p, g, m = (_normal(generator, 1.0) for _ in range(3))
    v = _normal(generator, 1.0) ** 2
    b1, b2 = torch.tensor(beta1), torch.tensor(beta2)
    m1 = b1 * m + (1 - b1) * g
    v1 = b2 * v + (1 - b2) * g * g
    c1, c2 = 1 - b1**step, 1 - b2**step
    q = p - (torch.tensor(lr) / c1) * m1 / ((v1 / c2).sqrt() + torch.tensor(eps))
    given = {
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": 0.0,
        "step": step,
    }
    single = adamw.scalars(**given, reading="single")
    double = adamw.scalars(**given, reading="double")
    assert _share(q, adamw.parameter(p.double(), m1.double(), v1.double(), single)) <= 1.0
    assert _share(v1, adamw.exp_avg_sq(v.double(), g.double(), single)) <= 1.0
    # 1 - fl(beta2) differs from 1 - beta2 by 1.3e-5 relative: the other reading sees it.
    assert compare(v1, adamw.exp_avg_sq(v.double(), g.double(), double))[1] is not None


def test_bounds_of_nothing_are_a_few_of_the_smallest_numbers() -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    s = adamw.scalars(
        lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1, reading="double"
    )
    assert float(adamw.exp_avg(zero, zero, s).bound) <= 4 * ETA
    assert float(adamw.exp_avg_sq(zero, zero, s).bound) <= 4 * ETA
    assert float(bounds.gradient(zero, zero, 3).bound) <= 4 * ETA
