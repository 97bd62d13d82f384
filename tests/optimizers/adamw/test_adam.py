"""Adam, whose decay is added to the gradient: bounds, causes, and what is recovered."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from optimizer_steps import SIZE, OneStep, fourth_step, vector

from zerocheck import causes as bugs
from zerocheck.case.schema import Group, KernelKind, Optimizer
from zerocheck.judge.compare import compare
from zerocheck.optimizers import OPTIMIZERS
from zerocheck.optimizers.specification import Interval, Segment, UpdateElements, UpdateRule

ADAM: UpdateRule = OPTIMIZERS["adam"]  # type: ignore[assignment]
GROUP = Group(lr=0.1, beta1=0.9, beta2=0.95, weight_decay=0.25)
KERNELS: tuple[KernelKind, ...] = ("for-loop", "foreach", "fused")
PLAIN = Optimizer(kind="adam")


def held(options: Optimizer, scale: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    found = {"exp_avg": vector(8, scale, dtype), "exp_avg_sq": vector(9, scale**2, dtype).abs()}
    if options.amsgrad:
        found["max_exp_avg_sq"] = found["exp_avg_sq"] * 2
    return found


def step(
    p: torch.Tensor,
    g: torch.Tensor,
    old: Mapping[str, torch.Tensor],
    group: Group = GROUP,
    options: Optimizer = PLAIN,
    kind: type[torch.optim.Optimizer] | None = None,
) -> OneStep:
    return fourth_step(options, group, old, p=p, g=g, kind=kind)


def scalars(group: Group = GROUP, options: Optimizer = PLAIN) -> Any:
    return ADAM.scalars(group, options, lr=group.lr, step=4, reading="double")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_is_inside_and_some_step_is_near_the_bound(
    kernel: KernelKind, dtype: torch.dtype
) -> None:
    shares: dict[str, float] = {}
    for amsgrad, maximize, decay, scale, eps in itertools.product(
        (False, True), (False, True), (0.0, 0.01, 0.5), (1e-6, 1.0, 1e4), (1e-8, 1e-3)
    ):
        group = Group(lr=1e-2, beta1=0.9, beta2=0.95, weight_decay=decay, eps=eps)
        options = Optimizer(kind="adam", amsgrad=amsgrad, maximize=maximize, kernel=kernel)
        p, g = vector(1, 1.0, dtype), vector(2, scale, dtype)
        elements, observed = step(p, g, held(options, scale, dtype), group, options)
        for role, enclosure in ADAM.enclosures(elements, scalars(group, options)):
            share, misfit = compare(observed[role], enclosure)
            assert misfit is None, (role, share, group, options)
            shares[role] = max(share, shares.get(role, 0.0))
    assert shares.pop("max_exp_avg_sq") == 0  # a maximum is exact
    # The worst roundings of d, of its product and of lerp do not fall on one element of these.
    assert min(shares.values()) > 0.4, shares


@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_the_middle_is_the_reference_in_float64(decay: float) -> None:
    group = Group(lr=0.1, weight_decay=decay)
    p, g = vector(1), vector(2)
    old = held(PLAIN, 1.0, torch.float32)
    given = {"parameter": p.double(), **{n: s.double() for n, s in old.items()}}
    state = ADAM.reference_state({**given, "step": torch.tensor(3)})
    right: Any = ADAM.reference_options(group, PLAIN).after(state, g.double())
    new = {"exp_avg": right.exp_avg, "exp_avg_sq": right.exp_avg_sq}
    elements = UpdateElements(p.double(), g.double(), {n: s.double() for n, s in old.items()}, new)
    for role, enclosure in ADAM.enclosures(elements, scalars(group)):
        torch.testing.assert_close(enclosure.exact, getattr(right, role), rtol=1e-13, atol=1e-15)


def test_what_is_16_roundings_away_is_outside() -> None:
    elements, observed = step(vector(1), vector(2), held(PLAIN, 1.0, torch.float32))
    for role, enclosure in ADAM.enclosures(elements, scalars()):
        off = observed[role] * (1 + 2.0**-19)
        assert compare(off, enclosure)[1] is not None, role


def segment(role: str, wrong: OneStep) -> Segment:
    elements, observed = wrong
    return Segment(
        role=role,
        observed=observed[role],
        elements=elements,
        scalars=scalars(),
        step=4,
        rates=(0.1,),
        others=[(Group(pattern="bias", lr=0.1, weight_decay=0.0625), 0.1)],
        unclipped=vector(2).double() * 3,
        parameter_after=observed["parameter"],
    )


def causes_of(one: Segment) -> set[str]:
    return {cause for cause, made in ADAM.variants(one) if compare(one.observed, made)[1] is None}


def wrong_steps() -> dict[str, OneStep]:
    p, g, old = vector(1), vector(2), held(PLAIN, 1.0, torch.float32)
    right, _ = step(p, g, old)

    def on_right(made: OneStep) -> Any:
        elements, observed = made
        return elements._replace(gradient=right.gradient), observed

    def with_decay(decay: float) -> Any:
        return step(p, g, old, Group(lr=0.1, beta1=0.9, beta2=0.95, weight_decay=decay))

    return {
        bugs.WEIGHT_DECAY_MISSING: with_decay(0.0),
        bugs.WEIGHT_DECAY_TWICE: with_decay(0.5),
        bugs.OPTIONS_OF_ANOTHER_GROUP: with_decay(0.0625),
        bugs.DECOUPLED_INSTEAD_OF_L2: step(p, g, old, kind=torch.optim.AdamW),
        bugs.GRADIENT_WITH_THE_WRONG_SIGN: on_right(step(p, -g, old)),
        bugs.GRADIENT_BEFORE_CLIPPING: on_right(step(p, 3 * g, old)),
        bugs.MOMENTS_RESET: step(p, g, {n: torch.zeros_like(s) for n, s in old.items()}),
    }


@pytest.mark.parametrize("cause", list(wrong_steps()))
def test_causes_of_a_wrong_moment(cause: str) -> None:
    elements, observed = wrong_steps()[cause]
    if cause == bugs.MOMENTS_RESET:
        old = held(PLAIN, 1.0, torch.float32)
        elements = elements._replace(old={n: s.double() for n, s in old.items()})
    one = segment("exp_avg", (elements, observed))
    right = dict(ADAM.enclosures(elements, one.scalars))["exp_avg"]
    assert compare(one.observed, right)[1] is not None
    assert causes_of(one) == {cause}


def test_a_parameter_that_shrinks_as_well() -> None:
    elements, observed = step(vector(1), vector(2), held(PLAIN, 1.0, torch.float32))
    shrunk = observed["parameter"] - elements.parameter * GROUP.lr * GROUP.weight_decay
    made = elements, {**observed, "parameter": shrunk.float().double()}
    assert causes_of(segment("parameter", made)) == {bugs.WEIGHT_DECAY_TWICE}
    decoupled = step(vector(1), vector(2), held(PLAIN, 1.0, torch.float32), kind=torch.optim.AdamW)
    assert causes_of(segment("parameter", decoupled)) == {bugs.DECOUPLED_INSTEAD_OF_L2}


@pytest.mark.parametrize("role", ["exp_avg", "exp_avg_sq", "parameter"])
def test_the_first_line_is_right_and_one_of_the_others_is_the_mistake(role: str) -> None:
    one = segment(role, step(vector(1), vector(2), held(PLAIN, 1.0, torch.float32)))
    lines = list(ADAM.equations(one))
    made = sum(lines[0].right[name] * term for name, term in lines[0].terms.items())
    torch.testing.assert_close(made, one.observed, rtol=1e-5, atol=1e-7)
    if role != "parameter":
        words = [line.replaced for line in lines]
        assert "with no weight decay in the gradient" in words
        assert "with twice the weight decay in the gradient" in words
        assert "with weight_decay of another group ('bias') in the gradient" in words


@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_the_gradient_is_recovered(decay: float) -> None:
    group = Group(lr=0.1, beta1=0.9, beta2=0.95, weight_decay=decay)
    p, g = vector(1), vector(2)
    elements, observed = step(p, g, held(PLAIN, 1.0, torch.float32), group)
    old = {**elements.old, "parameter": p.double()}
    found = ADAM.recovered(old, observed, scalars(group), elements.format)
    off = (found.middle - g.double()).abs()
    assert bool((off <= found.error).all())
    assert float(found.error.max()) < 1e-4


@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_hidden_moments_are_enclosed(decay: float) -> None:
    group = Group(lr=0.1, beta1=0.9, beta2=0.95, weight_decay=decay)
    p, g, old = vector(1), vector(2), held(PLAIN, 1.0, torch.float32)
    elements, observed = step(p, g, old, group)
    hidden = {n: Interval(s, torch.zeros_like(s)) for n, s in elements.old.items()}
    gradient = Interval(g.double(), torch.zeros(SIZE, dtype=torch.float64))
    after = ADAM.hidden_after(p.double(), hidden, gradient, scalars(group))
    for role, (middle, error) in after.items():
        assert bool(((observed[role] - middle).abs() <= error).all()), role
    made = ADAM.range(p.double(), hidden, gradient, scalars(group))
    assert compare(observed["parameter"], made)[1] is None
    wrong = step(p, g, old, group, kind=torch.optim.AdamW)[1]["parameter"]
    assert (compare(wrong, made)[1] is None) == (decay == 0)


def test_decoupled_decay_is_another_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    for decay, words in ((0.5, "applies its weight decay of 0.5 apart"), (0.0, "")):
        optimizer = torch.optim.Adam([parameter], weight_decay=decay, decoupled_weight_decay=True)
        assert words in ADAM.foreign_option(optimizer, optimizer.param_groups[0])
        assert bool(words) == bool(ADAM.foreign_option(optimizer, optimizer.param_groups[0]))
