"""The norm against math.hypot, and clipping against torch.nn.utils.clip_grad_norm_."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerocheck_reference import CLIP_RULES, clip_coefficient, gradient_norm

U = 2.0**-24
finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.lists(finite, max_size=6), max_size=4))
def test_norm_is_exact_to_float64(rows: list[list[float]]) -> None:
    """Any finite float64: nothing overflows or underflows on the way.

    math.hypot is within one unit in the last place, 2 * 2**-53; ours within (n + 2) 2**-53.
    Among the subnormals a rounding is 2**-1075 at most, for each of the two.
    """
    tensors = [torch.tensor(row, dtype=torch.float64) for row in rows]
    flat = [x for row in rows for x in row]
    norm = gradient_norm(tensors)
    assert norm.dtype == torch.float64 and norm.shape == ()
    exact = math.hypot(*flat)
    if math.isinf(exact):
        assert norm.item() > 0.9 * torch.finfo(torch.float64).max
    else:
        bound = (len(flat) + 4) * 2.0**-53 * exact + 2.0**-1074
        assert not abs(norm.item() - exact) > bound
    peak = max(map(abs, flat), default=0.0)
    assert gradient_norm(tensors, p=math.inf).item() == peak


@pytest.mark.parametrize("scale", [1e-40, 1e-5, 1.0, 1e30])
def test_norm_of_float32_where_float32_squares_fail(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, generator=generator) * scale for n in (1000, 1, 77)]
    flat = torch.cat(tensors).tolist()
    assert gradient_norm(tensors).item() == pytest.approx(math.hypot(*flat), rel=1080 * 2.0**-53)


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_norm_of_nothing_and_of_what_is_not_finite(p: float) -> None:
    assert gradient_norm([], p=p).item() == 0.0
    assert gradient_norm([torch.empty(0), torch.zeros(2)], p=p).item() == 0.0
    assert gradient_norm([torch.tensor([1.0, -math.inf])], p=p).item() == math.inf
    both = [torch.tensor([math.inf]), torch.tensor(math.nan), torch.ones(2)]
    for order in (both, both[::-1]):
        assert math.isnan(gradient_norm(order, p=p).item())
    least = torch.tensor([5e-324, -5e-324, 5e-324, 5e-324], dtype=torch.float64)
    assert gradient_norm([least], p=p).item() == (1e-323 if p == 2.0 else 5e-324)
    mixed = [torch.tensor([3.0]), torch.tensor(4.0, dtype=torch.bfloat16)]
    assert gradient_norm(mixed, p=p).item() == (5.0 if p == 2.0 else 4.0)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.floats(-6, 6), st.floats(1e-6, 1e6), st.integers(1, 300), st.sampled_from([2.0, math.inf])
)
def test_clipping_is_that_of_torch(power: float, max_norm: float, n: int, p: float) -> None:
    """torch's norm is within u (n/2 + 4) of ours, for a kernel of unknown order.

    Its coefficient, from its own norm: one rounding of the sum, two of the quotient, and one of
    the cast of c, so 4 u. The product with the gradient is one more. Nothing is subnormal here.
    """
    g = torch.randn(n, generator=torch.Generator().manual_seed(n)) * 10.0**power
    parameter = torch.nn.Parameter(torch.zeros(n))
    parameter.grad = g.clone()
    theirs = torch.nn.utils.clip_grad_norm_([parameter], max_norm, norm_type=p).item()
    ours = gradient_norm([g], p=p).item()
    assert abs(theirs - ours) <= U * (n / 2 + 4) * ours
    exact = g.double() * clip_coefficient(theirs, max_norm)
    error = (parameter.grad.double() - exact).abs()
    assert bool((error <= 5 * U * exact.abs() * (1 + 1e-6)).all())


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.floats(0, 1e30), st.floats(0, 1e30))
def test_both_rules_against_their_words(norm: float, c: float) -> None:
    torch_rule, hard_rule = CLIP_RULES
    hard = clip_coefficient(norm, c, rule=hard_rule)
    assert hard == (c / norm if norm > c else 1.0)
    assert clip_coefficient(norm, c, rule=hard_rule, eps=5.0) == hard
    soft = clip_coefficient(norm, c, rule=torch_rule)
    assert soft == min(1.0, c / (norm + 1e-6))
    assert soft <= hard


def test_coefficient_at_the_edges() -> None:
    assert clip_coefficient(1.0, 1.0) == 1.0 / (1.0 + 1e-6) < 1.0
    assert clip_coefficient(1.0, 1.0, rule="c/norm if norm>c") == 1.0
    assert clip_coefficient(3.0, 1.5, eps=0.0) == 0.5
    assert clip_coefficient(0.0, 1.0, eps=0.0) == 1.0
    assert math.isnan(clip_coefficient(0.0, 0.0, eps=0.0))
    assert math.isnan(clip_coefficient(math.nan, 1.0))
    assert clip_coefficient(math.nan, 1.0, rule="c/norm if norm>c") == 1.0
    assert clip_coefficient(math.inf, 1.0) == 0.0
    assert clip_coefficient(7.0, math.inf) == 1.0


@pytest.mark.parametrize("norm", [0.0, 1.0, math.inf, math.nan])
@pytest.mark.parametrize("c", [0.0, 1.0, math.inf])
def test_not_finite_is_what_torch_makes_of_it(norm: float, c: float) -> None:
    theirs = torch.clamp(c / (torch.tensor(norm) + 1e-6), max=1.0).item()
    assert clip_coefficient(norm, c) == pytest.approx(theirs, rel=4 * U, nan_ok=True)


def test_refusals() -> None:
    for p in (1.0, 0.0, math.nan):
        with pytest.raises(ValueError, match=r"p is .*allowed: 2.0, inf"):
            gradient_norm([torch.ones(1)], p=p)
    with pytest.raises(ValueError, match=r"did you mean 'c/norm if norm>c'"):
        clip_coefficient(1.0, 1.0, rule="c/norm if norm>=c")  # type: ignore[arg-type]
    for bad in ((-1.0, 1.0), (1.0, -1.0), (1.0, math.nan)):
        with pytest.raises(ValueError, match="allowed"):
            clip_coefficient(*bad)
    with pytest.raises(ValueError, match="eps is -1"):
        clip_coefficient(1.0, 1.0, eps=-1.0)
