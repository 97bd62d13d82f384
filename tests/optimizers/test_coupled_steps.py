"""Optimizers that add the decay to the gradient: bounds, causes of a wrong step, lines of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from optimizer_steps import OneStep, fourth_step, vector

from zerocheck import causes as bugs
from zerocheck.case.schema import Group, KernelKind, Optimizer, OptimizerKind
from zerocheck.judge.compare import compare
from zerocheck.judge.diagnose.update import fitting
from zerocheck.optimizers import OPTIMIZERS
from zerocheck.optimizers.specification import Segment, UpdateRule

GROUP = Group(lr=0.1, beta2=0.875, weight_decay=0.25, eps=1e-3)
OTHER = Group(pattern="bias", lr=0.2, beta2=0.75, weight_decay=0.0625, eps=1e-3)
FORMS = {
    "adagrad": Optimizer(kind="adagrad"),
    "rmsprop": Optimizer(kind="rmsprop"),
    "rmsprop with momentum": Optimizer(kind="rmsprop", momentum=0.9),
    "adam": Optimizer(kind="adam"),
    "amsgrad": Optimizer(kind="adam", amsgrad=True),
}
BY_FORM = pytest.mark.parametrize("form", FORMS)


def rule_of(kind: OptimizerKind) -> UpdateRule:
    found: Any = OPTIMIZERS[kind]
    return found  # type: ignore[no-any-return]


def held(options: Optimizer, scale: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return states of mid-training."""
    squares = vector(9, scale**2, dtype).abs()
    states = {
        "momentum_buffer": vector(8, 1.0, dtype),
        "exp_avg": vector(8, scale, dtype),
        "max_exp_avg_sq": squares * 2,
    }
    roles = rule_of(options.kind).states_with(options)
    return {role: states.get(role, squares) for role in roles}


def step(options: Optimizer, old: Mapping[str, torch.Tensor], **given: Any) -> OneStep:
    return fourth_step(options, given.pop("group", GROUP), old, **given)


def scalars(options: Optimizer, group: Group = GROUP) -> Any:
    rule = rule_of(options.kind)
    return rule.scalars(group, options, lr=group.lr, step=4, reading="double")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernel", ["for-loop", "foreach", "fused"])
@BY_FORM
def test_every_kernel_is_inside_and_some_step_is_near_the_bound(
    form: str, kernel: KernelKind, dtype: torch.dtype
) -> None:
    shares: dict[str, float] = {}
    kind = FORMS[form].kind
    for maximize, decay, scale, eps in itertools.product(
        (False, True), (0.0, 0.01, 0.5), (1e-12, 1e-6, 1.0, 1e4), (1e-8, 1e-3)
    ):
        group = Group(lr=1e-2, beta2=0.95, weight_decay=decay, eps=eps)
        options = replace(FORMS[form], maximize=maximize, kernel=kernel)
        made = step(
            options,
            held(options, scale, dtype),
            group=group,
            p=vector(1, 1.0, dtype),
            g=vector(2, scale, dtype),
        )
        for role, enclosure in rule_of(kind).enclosures(made[0], scalars(options, group)):
            share, misfit = compare(made[1][role], enclosure)
            assert misfit is None, (role, share, group, options)
            shares[role] = max(share, shares.get(role, 0.0))
    assert len(shares) == 1 + len(rule_of(kind).states_with(FORMS[form]))
    assert shares.pop("max_exp_avg_sq", 0.0) == 0  # a maximum is exact
    # The worst roundings of a lerp and of what is added to it do not fall on one element of these.
    assert min(shares.values()) > (0.4 if kind == "adam" else 0.5), shares


@BY_FORM
def test_what_is_16_roundings_away_is_outside(form: str) -> None:
    options = FORMS[form]
    elements, observed = step(options, held(options, 1.0, torch.float32))
    for role, enclosure in rule_of(options.kind).enclosures(elements, scalars(options)):
        assert compare(observed[role] * (1 + 2.0**-19), enclosure)[1] is not None, role


def segment(options: Optimizer, role: str, made: OneStep) -> Segment:
    elements, observed = made
    return Segment(
        role=role,
        observed=observed[role],
        elements=elements,
        options=options,
        group=GROUP,
        lr=GROUP.lr,
        step=4,
        reading="double",
        rates=(0.1, 0.3),
        others=[(OTHER, 0.2)],
        unclipped=(3 * vector(2)).double(),
        previous=vector(5).double(),
        parameter_after=observed["parameter"],
    )


def wrong_steps(options: Optimizer) -> Iterator[tuple[str, str, OneStep]]:
    """Iterate over mistakes: the cause, the role in which it shows first, and the step."""
    old = held(options, 1.0, torch.float32)
    squares = {"adagrad": "sum", "rmsprop": "square_avg", "adam": "exp_avg"}[options.kind]
    right, _ = step(options, old)

    def as_right(made: OneStep, **more: Any) -> OneStep:
        return made[0]._replace(gradient=right.gradient, old=right.old, **more), made[1]

    yield (
        bugs.WEIGHT_DECAY_MISSING,
        squares,
        step(options, old, group=replace(GROUP, weight_decay=0.0)),
    )
    yield (
        bugs.WEIGHT_DECAY_TWICE,
        squares,
        step(options, old, group=replace(GROUP, weight_decay=0.5)),
    )
    of_other = replace(GROUP, weight_decay=0.0625)
    yield bugs.OPTIONS_OF_ANOTHER_GROUP, squares, step(options, old, group=of_other)
    yield bugs.GRADIENT_BEFORE_CLIPPING, squares, as_right(step(options, old, g=3 * vector(2)))
    yield bugs.GRADIENT_OF_THE_PREVIOUS_STEP, squares, as_right(step(options, old, g=vector(5)))
    yield bugs.GRADIENT_WITH_THE_WRONG_SIGN, squares, as_right(step(options, old, g=-vector(2)))
    zeros = {name: torch.zeros_like(state) for name, state in old.items()}
    yield bugs.MOMENTS_RESET, squares, as_right(step(options, zeros))
    shrunk = vector(1) * (1 - GROUP.lr * GROUP.weight_decay)
    apart = step(options, old, p=shrunk, group=replace(GROUP, weight_decay=0.0))
    yield (
        bugs.DECOUPLED_INSTEAD_OF_L2,
        squares,
        (apart[0]._replace(parameter=vector(1).double()), apart[1]),
    )
    e, observed = step(options, old)
    moved = (observed["parameter"] - GROUP.lr * GROUP.weight_decay * e.parameter).float().double()
    yield bugs.WEIGHT_DECAY_TWICE, "parameter", (e, {**observed, "parameter": moved})
    if options.kind == "adam":
        decoupled = step(options, old, kind=torch.optim.AdamW)
        yield bugs.DECOUPLED_INSTEAD_OF_L2, "parameter", decoupled
        return
    late = step(options, old, group=replace(GROUP, lr=0.3))
    yield bugs.LEARNING_RATE_OF_ANOTHER_STEP, "parameter", late
    rate = step(options, old, group=replace(GROUP, lr=0.2))
    yield bugs.OPTIONS_OF_ANOTHER_GROUP, "parameter", rate
    if options.kind == "rmsprop":
        alpha = step(options, old, group=replace(GROUP, beta2=0.75, weight_decay=0.0625))
        yield bugs.OPTIONS_OF_ANOTHER_GROUP, squares, alpha
    d = e.gradient + GROUP.weight_decay * e.parameter
    inside = d / (e.new[squares] + GROUP.eps).sqrt()
    before = d / (e.old[squares].sqrt() + GROUP.eps)
    for cause, n in (
        (bugs.EPS_INSIDE_THE_ROOT, inside),
        (bugs.MOMENTS_OF_THE_PREVIOUS_STEP, before),
    ):
        if options.momentum:
            buffer = (options.momentum * e.old["momentum_buffer"] + n).float().double()
            new = {**e.new, "momentum_buffer": buffer}
            yield (
                cause,
                "momentum_buffer",
                (e._replace(new=new), {**observed, "momentum_buffer": buffer}),
            )
        else:
            moved = (e.parameter - GROUP.lr * n).float().double()
            yield cause, "parameter", (e, {**observed, "parameter": moved})
    if options.momentum:
        n = d / (e.new[squares].sqrt() + GROUP.eps)
        buffer = (options.momentum * e.old["momentum_buffer"] + GROUP.lr * n).float().double()
        new = {**e.new, "momentum_buffer": buffer}
        yield (
            bugs.LEARNING_RATE_IN_THE_MOMENTUM,
            "momentum_buffer",
            (e._replace(new=new), {**observed, "momentum_buffer": buffer}),
        )
        moved = (e.parameter - GROUP.lr * n).float().double()
        yield bugs.MOMENTUM_LEFT_OUT, "parameter", (e, {**observed, "parameter": moved})
        moved = (e.parameter - GROUP.lr * e.old["momentum_buffer"]).float().double()
        yield (
            bugs.MOMENTS_OF_THE_PREVIOUS_STEP,
            "parameter",
            (e, {**observed, "parameter": moved}),
        )


ALL = [
    pytest.param(form, number, id=f"{form}-{role}-{cause}")
    for form, options in FORMS.items()
    for number, (cause, role, _) in enumerate(wrong_steps(options))
]


@pytest.mark.parametrize(("form", "number"), ALL)
def test_a_mistake_is_outside_and_named(form: str, number: int) -> None:
    options = FORMS[form]
    cause, role, made = list(wrong_steps(options))[number]
    one = segment(options, role, made)
    rule = rule_of(options.kind)
    right = dict(rule.enclosures(one.elements, scalars(options)))[role]
    assert compare(one.observed, right)[1] is not None
    assert {change.cause for change in fitting(rule, [one])} == {cause}
