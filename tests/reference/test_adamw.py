"""One step of AdamW against torch.optim, and against the longdouble oracle."""

from __future__ import annotations

import math
from dataclasses import replace
from operator import itemgetter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zerocheck_reference import AdamWOptions, AdamWState, adamw_step, bias_correction, initial_state

from .oracle import correction, wide
from .states import assert_judged, holds, judge, mapped, optimizer_state, tensors

KERNELS = ["for-loop", "foreach", "fused"]
KINDS = ["random", "denormal", "zero", "huge", "mixed"]
STARTS = [0, 1, 2, 255, 256, 10_000, 1_000_000]
OPTIONS = {
    "default": AdamWOptions(),
    "fast": AdamWOptions(lr=1e-2, eps=1e-3, weight_decay=0.1),
    "slow": AdamWOptions(lr=1e-5, beta1=0.99, beta2=0.9999, weight_decay=0.0),
    "zero betas": AdamWOptions(lr=0.1, beta1=0.0, beta2=0.0),
    "close to one": AdamWOptions(lr=1.0, beta1=0.999999, beta2=0.999999),
    "amsgrad": AdamWOptions(lr=1e-2, amsgrad=True),
    "maximize": AdamWOptions(lr=1e-2, maximize=True),
    "both": AdamWOptions(amsgrad=True, maximize=True, eps=1e-3),
}
SIZE = 257


def draw(kind: str, generator: torch.Generator, size: int = SIZE) -> Tensor:
    """Gradient-like values; huge stays below the root of the largest float32."""
    x = torch.randn(size, generator=generator)
    if kind == "zero":
        return torch.zeros(size)
    if kind == "mixed":
        return x * 10.0 ** torch.randint(-30, 18, (size,), generator=generator)
    return x * {"random": 1.0, "denormal": 1e-40, "huge": 1e18}[kind]


def make_state(kind: str, step: int, *, amsgrad: bool, seed: int = 0) -> AdamWState:
    """A state in mid-training; some parameters are exactly 0, where the update is seen best."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(SIZE, generator=generator)
    p[::3] = 0.0
    if step == 0:
        return initial_state(p, amsgrad=amsgrad)
    m = draw(kind, generator)
    v = draw(kind, generator).square()
    return AdamWState(p, m, v, step, v * 1.5 if amsgrad else None)


class TorchAdamW:
    """torch.optim.AdamW on one tensor, started from a state."""

    def __init__(self, state: AdamWState, o: AdamWOptions, kernel: str) -> None:
        self.parameter = state.parameter.clone().requires_grad_()
        self.optimizer = torch.optim.AdamW(
            [self.parameter],
            lr=o.lr,
            betas=(o.beta1, o.beta2),
            eps=o.eps,
            weight_decay=o.weight_decay,
            amsgrad=o.amsgrad,
            maximize=o.maximize,
            foreach=kernel == "foreach",
            fused=kernel == "fused",
        )
        held = {
            "step": torch.tensor(float(state.step)),
            "exp_avg": state.exp_avg.clone(),
            "exp_avg_sq": state.exp_avg_sq.clone(),
        }
        if state.max_exp_avg_sq is not None:
            held["max_exp_avg_sq"] = state.max_exp_avg_sq.clone()
        self.optimizer.state[self.parameter] = held

    def step(self, gradient: Tensor) -> AdamWState:
        self.parameter.grad = gradient.clone()
        self.optimizer.step()
        after = optimizer_state(self.optimizer, self.parameter)
        assert after is not None
        return after


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("start", STARTS)
def test_float32_steps_of_torch_and_ours_lie_within_the_bounds(
    kernel: str, name: str, start: int
) -> None:
    """Three steps in torch, each judged from the state that torch itself held before it.

    Both its result and ours must lie in the bounds around the exact step, so they differ by the
    sum of two bounds at most. The step count and AMSGrad's maximum are equal bit for bit.
    """
    options = OPTIONS[name]
    for seed, kind in enumerate(KINDS):
        before = make_state(kind, start, amsgrad=options.amsgrad, seed=seed)
        theirs = TorchAdamW(before, options, kernel)
        generator = torch.Generator().manual_seed(100 + seed)
        for _ in range(3):
            g = draw(kind, generator)
            after = theirs.step(g)
            ours = adamw_step(before, g, options)
            assert_judged(before, g, options, after)
            assert_judged(before, g, options, ours)
            before = after


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_float64_step_is_exact_to_a_few_units(name: str, start: int, kind: str) -> None:
    """The float64 result is what the judge calls exact: 15.5 u = 1.7e-15 of the update."""
    options = OPTIONS[name]
    before = make_state(kind, start, amsgrad=options.amsgrad)
    before = mapped(before, Tensor.double)
    # Times pi, so that float32 could not hold it.
    g = draw(kind, torch.Generator().manual_seed(5)).double() * math.pi
    after = adamw_step(before, g, options)
    assert after.parameter.dtype == torch.float64
    assert_judged(before, g, options, after)


def test_float64_and_float32_agree_from_the_same_state() -> None:
    """The dtype of the state decides; a float32 gradient is taken into float64 exactly."""
    options = OPTIONS["fast"]
    before = make_state("random", 7, amsgrad=False)
    wide_before = mapped(before, Tensor.double)
    g = draw("random", torch.Generator().manual_seed(5))
    ours, exact = adamw_step(before, g, options), adamw_step(wide_before, g, options)
    assert ours.parameter.dtype == torch.float32
    same = adamw_step(wide_before, g.double(), options)
    assert torch.equal(exact.parameter, same.parameter)
    assert not torch.equal(ours.parameter.double(), exact.parameter)


unit = st.floats(0.0, 1.0, exclude_max=True)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.builds(
        AdamWOptions,
        lr=st.floats(1e-8, 1.0),
        beta1=unit,
        beta2=unit,
        eps=st.floats(1e-12, 1e-2),
        weight_decay=st.floats(0.0, 1.0),
        amsgrad=st.booleans(),
        maximize=st.booleans(),
    ),
    st.integers(0, 2_000_000),
    st.sampled_from(KINDS),
)
def test_any_options_stay_within_the_bounds(options: AdamWOptions, step: int, kind: str) -> None:
    before = make_state(kind, step, amsgrad=options.amsgrad)
    g = draw(kind, torch.Generator().manual_seed(9))
    assert_judged(before, g, options, adamw_step(before, g, options))
    before = mapped(before, Tensor.double)
    assert_judged(before, g.double(), options, adamw_step(before, g, options))


@settings(deadline=None, derandomize=True, max_examples=100)
@given(unit, st.integers(1, 10_000_000))
def test_bias_correction_to_five_units(beta: float, step: int) -> None:
    """log, product and expm1 at 2 u, 1 u and 2 u; conditions of at most 1."""
    exact = correction(beta, step)
    assert abs(wide(bias_correction(beta, step)) - exact) <= 5.01 * 2.0**-53 * exact


def test_bias_correction_at_the_ends() -> None:
    assert bias_correction(0.0, 1) == 1.0
    assert bias_correction(1 - 2.0**-53, 1) == 2.0**-53
    assert bias_correction(0.9, 10**7) == 1.0


def wrong_step(fault: str, state: AdamWState, g: Tensor, o: AdamWOptions) -> AdamWState:
    """A correct float64 step with one known bug, rounded to float32. "none" has no bug."""
    t = state.step + 1
    p, m, v = state.parameter.double(), state.exp_avg.double(), state.exp_avg_sq.double()
    g = g.double()
    sign = -1.0 if o.maximize and fault != "not maximized" else 1.0
    g = sign * g + (o.weight_decay * p if fault == "L2" else 0.0)
    m = o.beta1 * m + (1.0 if fault == "undamped" else 1 - o.beta1) * g
    v = o.beta2 * v + (1 - o.beta2) * (g.abs() if fault == "not squared" else g * g)
    if fault == "moments swapped":
        m, v = v, m
    m, v = m.float().double(), v.float().double()
    top = None
    if state.max_exp_avg_sq is not None:
        top = state.max_exp_avg_sq.double()
        top = (top if fault == "maximum stale" else torch.maximum(top, v)).float().double()
    late = {"step off by one": -1, "step ahead": 1}.get(fault, 0)
    c1, c2 = (1 - b ** (t + late) for b in (o.beta1, o.beta2))
    c1 = 1.0 if fault == "no first correction" else c1
    c2 = 1.0 if fault == "no second correction" else c2
    second = v if top is None or fault == "maximum unused" else top
    den = (second / c2).sqrt() + o.eps
    if fault == "eps in the root":
        den = (second / c2 + o.eps).sqrt()
    if fault == "eps before correction":
        den = (second.sqrt() + o.eps) / math.sqrt(c2)
    if fault == "eps missing":
        den = den - o.eps
    update = o.lr * (m / c1) / den
    kept = 1 - o.lr * o.weight_decay
    p = {
        "decay after": (p - update) * kept,
        "decay missing": p - update,
        "decay without lr": p * (1 - o.weight_decay) - update,
        "decay twice": p * kept * kept - update,
        "L2": p - update,
    }.get(fault, p * kept - update)
    return mapped(AdamWState(p, m, v, t, top), Tensor.float)


FAULTS = [
    "L2",
    "undamped",
    "not squared",
    "moments swapped",
    "step off by one",
    "step ahead",
    "no first correction",
    "no second correction",
    "eps in the root",
    "eps before correction",
    "eps missing",
    "decay after",
    "decay missing",
    "decay without lr",
    "decay twice",
    "not maximized",
    "maximum stale",
    "maximum unused",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_bounds_catch_a_planted_bug(fault: str) -> None:
    """Without the bug the same code passes, so it is the bug that is seen."""
    options = AdamWOptions(lr=1e-2, eps=1e-3, weight_decay=0.1)
    options = replace(
        options, amsgrad=fault.startswith("maximum"), maximize=fault == "not maximized"
    )
    before = make_state("random", 2, amsgrad=options.amsgrad)
    if before.max_exp_avg_sq is not None:
        # Below v in places, so that a stale maximum shows, and above it in others.
        before.max_exp_avg_sq[::2] *= 0.5
    g = draw("random", torch.Generator().manual_seed(3))
    assert_judged(before, g, options, wrong_step("none", before, g, options))
    assert not holds(judge(before, g, options, wrong_step(fault, before, g, options)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale", [1e25, math.inf, math.nan])
def test_what_is_not_finite_goes_where_torch_puts_it(kernel: str, scale: float) -> None:
    """A square that overflows stops the element; an infinite gradient makes it NaN."""
    options = AdamWOptions()
    before = make_state("random", 1, amsgrad=False)
    g = torch.where(torch.arange(SIZE) % 2 == 0, scale, 1.0)
    theirs, ours = TorchAdamW(before, options, kernel).step(g), adamw_step(before, g, options)
    for role in ("parameter", "exp_avg", "exp_avg_sq"):
        a, b = getattr(theirs, role), getattr(ours, role)
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf()), role
    assert ours.exp_avg_sq[0].isfinite().logical_not()


def test_a_step_is_pure_and_shares_no_memory() -> None:
    options = AdamWOptions(amsgrad=True, beta1=0.0, weight_decay=0.0, maximize=True)
    before = make_state("random", 3, amsgrad=True)
    g = draw("random", torch.Generator().manual_seed(2))
    given = [*tensors(before), g]
    copies = [x.clone() for x in given]
    after = adamw_step(before, g, options)
    assert all(torch.equal(x, y) for x, y in zip(given, copies, strict=True))
    held = {x.data_ptr() for x in given}
    assert not held & {x.data_ptr() for x in tensors(after)}
    p = torch.nn.Parameter(torch.ones(3))
    first = initial_state(p)
    assert not first.parameter.requires_grad and first.parameter.data_ptr() != p.data_ptr()
    assert not adamw_step(first._replace(parameter=p), p, AdamWOptions()).parameter.requires_grad


def test_one_flat_vector_is_as_good_as_many_tensors() -> None:
    options = OPTIONS["both"]
    state = make_state("mixed", 4, amsgrad=True)
    g = draw("mixed", torch.Generator().manual_seed(2))
    whole = adamw_step(state, g, options)
    for cut in (slice(0, 1), slice(1, 100), slice(100, SIZE)):
        part = mapped(state, itemgetter(cut))
        after = adamw_step(part, g[cut], options)
        for a, b in zip(tensors(after), tensors(whole), strict=True):
            assert torch.equal(a, b[cut])
    for shape in ((), (0,), (2, 0, 3)):
        after = adamw_step(initial_state(torch.ones(shape)), torch.ones(shape), AdamWOptions())
        assert after.parameter.shape == shape


def test_initial_state() -> None:
    p = torch.randn(2, 3, dtype=torch.float64)
    state = initial_state(p, amsgrad=True)
    assert torch.equal(state.parameter, p) and state.step == 0
    for moment in (state.exp_avg, state.exp_avg_sq, state.max_exp_avg_sq):
        assert moment is not None and moment.dtype == p.dtype
        assert torch.equal(moment, torch.zeros(2, 3, dtype=p.dtype))
    assert initial_state(p).max_exp_avg_sq is None


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("lr", [-1e-9, math.nan, math.inf, "1", None, True]),
        ("beta1", [-0.1, 1.0, math.nan]),
        ("beta2", [-0.1, 1.0, 2]),
        ("eps", [-1.0, math.inf]),
        ("weight_decay", [-1.0, math.nan]),
        ("amsgrad", [1, None]),
        ("maximize", ["yes"]),
    ],
)
def test_options_are_validated(field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{field} is .*allowed"):
            AdamWOptions(**{field: value})  # type: ignore[arg-type]
    assert AdamWOptions(lr=0, eps=0.0, beta1=0.0).lr == 0


def test_steps_are_validated() -> None:
    state = make_state("random", 1, amsgrad=False)
    g, o = torch.zeros(SIZE), AdamWOptions()
    refused: list[tuple[AdamWState, Tensor, AdamWOptions, str]] = [
        (state._replace(step=-1), g, o, "step is -1"),
        (state._replace(step=1.0), g, o, "step is 1.0"),  # type: ignore[arg-type]
        (state._replace(exp_avg=g[:1]), g, o, "exp_avg is .*shape"),
        (state._replace(exp_avg_sq=g.double()), g, o, "exp_avg_sq is torch.float64"),
        (state._replace(max_exp_avg_sq=g), g, o, "a tensor with amsgrad=False"),
        (state, g, AdamWOptions(amsgrad=True), "None with amsgrad=True"),
        (state, g[:1], o, "gradient is .*shape"),
        (state, g.double(), o, "gradient is torch.float64"),
        (state._replace(parameter=g.int()), g, o, "parameter is torch.int32"),
    ]
    for bad, gradient, options, message in refused:
        with pytest.raises(ValueError, match=message):
            adamw_step(bad, gradient, options)
    with pytest.raises(ValueError, match=r"torch\.int64"):
        initial_state(torch.tensor([1]))
    with pytest.raises(ValueError, match="amsgrad is 1"):
        initial_state(torch.ones(1), amsgrad=1)  # type: ignore[arg-type]


def test_the_oracle_is_wider_than_float64() -> None:
    """On a machine whose longdouble is a double the oracle would prove nothing."""
    assert np.finfo(np.longdouble).nmant >= 63
