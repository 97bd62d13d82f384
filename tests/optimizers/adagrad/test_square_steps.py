"""Adagrad and RMSprop: bounds, causes of a wrong step, and lines of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from optimizer_steps import OneStep, fourth_step, vector

from zerocheck import causes as bugs
from zerocheck.case.schema import Group, KernelKind, Optimizer, OptimizerKind
from zerocheck.judge.compare import compare
from zerocheck.optimizers import OPTIMIZERS
from zerocheck.optimizers.specification import Segment, UpdateRule

GROUP = Group(lr=0.1, beta2=0.875, weight_decay=0.25, eps=1e-3)
OTHER = Group(pattern="bias", lr=0.2, beta2=0.75, weight_decay=0.0625, eps=1e-3)
FORMS: tuple[tuple[OptimizerKind, float], ...] = (
    ("adagrad", 0.0),
    ("rmsprop", 0.0),
    ("rmsprop", 0.9),
)
"""Optimizer, and its momentum."""


def rule_of(kind: OptimizerKind) -> UpdateRule:
    found: Any = OPTIMIZERS[kind]
    return found  # type: ignore[no-any-return]


def held(options: Optimizer, scale: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return states of mid-training."""
    return {
        role: vector(8, 1.0, dtype)
        if role == "momentum_buffer"
        else vector(9, scale**2, dtype).abs()
        for role in rule_of(options.kind).states_with(options)
    }


def step(options: Optimizer, old: Mapping[str, torch.Tensor], **given: Any) -> OneStep:
    return fourth_step(options, given.pop("group", GROUP), old, **given)


def scalars(options: Optimizer, group: Group = GROUP) -> Any:
    rule = rule_of(options.kind)
    return rule.scalars(group, options, lr=group.lr, step=4, reading="double")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernel", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize(("kind", "momentum"), FORMS)
def test_every_kernel_is_inside_and_some_step_is_near_the_bound(
    kind: OptimizerKind, momentum: float, kernel: KernelKind, dtype: torch.dtype
) -> None:
    shares: dict[str, float] = {}
    for maximize, decay, scale, eps in itertools.product(
        (False, True), (0.0, 0.01, 0.5), (1e-12, 1e-6, 1.0, 1e4), (1e-8, 1e-3)
    ):
        group = Group(lr=1e-2, beta2=0.95, weight_decay=decay, eps=eps)
        options = Optimizer(kind=kind, maximize=maximize, kernel=kernel, momentum=momentum)
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
    assert len(shares) == 2 + bool(momentum)
    assert min(shares.values()) > 0.5, shares


@pytest.mark.parametrize(("kind", "momentum"), FORMS)
def test_what_is_16_roundings_away_is_outside(kind: OptimizerKind, momentum: float) -> None:
    options = Optimizer(kind=kind, momentum=momentum)
    elements, observed = step(options, held(options, 1.0, torch.float32))
    for role, enclosure in rule_of(kind).enclosures(elements, scalars(options)):
        assert compare(observed[role] * (1 + 2.0**-19), enclosure)[1] is not None, role


def segment(options: Optimizer, role: str, made: OneStep) -> Segment:
    elements, observed = made
    return Segment(
        role=role,
        observed=observed[role],
        elements=elements,
        scalars=scalars(options),
        step=4,
        rates=(0.1, 0.3),
        others=[(OTHER, 0.2)],
        unclipped=(3 * vector(2)).double(),
        previous=vector(5).double(),
        parameter_after=observed["parameter"],
    )


def replaced(group: Group = GROUP, **given: Any) -> Group:
    fields = {
        name: getattr(group, name) for name in ("lr", "beta2", "weight_decay", "eps", "pattern")
    }
    return Group(**{**fields, **given})


def wrong_steps(options: Optimizer) -> Iterator[tuple[str, str, OneStep]]:
    """Iterate over mistakes: the cause, the role in which it shows first, and the step."""
    old = held(options, 1.0, torch.float32)
    squares = "sum" if options.kind == "adagrad" else "square_avg"
    right, _ = step(options, old)

    def as_right(made: OneStep, **more: Any) -> OneStep:
        return made[0]._replace(gradient=right.gradient, old=right.old, **more), made[1]

    yield bugs.WEIGHT_DECAY_MISSING, squares, step(options, old, group=replaced(weight_decay=0.0))
    yield bugs.WEIGHT_DECAY_TWICE, squares, step(options, old, group=replaced(weight_decay=0.5))
    of_other = replaced(weight_decay=0.0625)
    yield bugs.OPTIONS_OF_ANOTHER_GROUP, squares, step(options, old, group=of_other)
    yield bugs.GRADIENT_BEFORE_CLIPPING, squares, as_right(step(options, old, g=3 * vector(2)))
    yield bugs.GRADIENT_OF_THE_PREVIOUS_STEP, squares, as_right(step(options, old, g=vector(5)))
    yield bugs.GRADIENT_WITH_THE_WRONG_SIGN, squares, as_right(step(options, old, g=-vector(2)))
    zeros = {name: torch.zeros_like(state) for name, state in old.items()}
    yield bugs.MOMENTS_RESET, squares, as_right(step(options, zeros))
    shrunk = vector(1) * (1 - GROUP.lr * GROUP.weight_decay)
    apart = step(options, old, p=shrunk, group=replaced(weight_decay=0.0))
    yield (
        bugs.DECOUPLED_INSTEAD_OF_L2,
        squares,
        (apart[0]._replace(parameter=vector(1).double()), apart[1]),
    )
    late = step(options, old, group=replaced(lr=0.3))
    yield bugs.LEARNING_RATE_OF_ANOTHER_STEP, "parameter", late
    rate = step(options, old, group=replaced(lr=0.2))
    yield bugs.OPTIONS_OF_ANOTHER_GROUP, "parameter", rate
    if options.kind == "rmsprop":
        alpha = step(options, old, group=replaced(beta2=0.75, weight_decay=0.0625))
        yield bugs.OPTIONS_OF_ANOTHER_GROUP, squares, alpha
    e, observed = step(options, old)
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
    moved = (observed["parameter"] - GROUP.lr * GROUP.weight_decay * e.parameter).float().double()
    yield bugs.WEIGHT_DECAY_TWICE, "parameter", (e, {**observed, "parameter": moved})


ALL = [
    pytest.param(kind, momentum, number, id=f"{kind}-{momentum:g}-{role}-{cause}")
    for kind, momentum in FORMS
    for number, (cause, role, _) in enumerate(wrong_steps(Optimizer(kind=kind, momentum=momentum)))
]


@pytest.mark.parametrize(("kind", "momentum", "number"), ALL)
def test_a_mistake_is_outside_and_named(kind: OptimizerKind, momentum: float, number: int) -> None:
    options = Optimizer(kind=kind, momentum=momentum)
    cause, role, made = list(wrong_steps(options))[number]
    one = segment(options, role, made)
    rule = rule_of(kind)
    right = dict(rule.enclosures(one.elements, one.scalars))[role]
    assert compare(one.observed, right)[1] is not None
    found = {
        name for name, wanted in rule.variants(one) if compare(one.observed, wanted)[1] is None
    }
    assert found == {cause}


@pytest.mark.parametrize(("kind", "momentum"), FORMS)
def test_the_first_line_is_right(kind: OptimizerKind, momentum: float) -> None:
    options = Optimizer(kind=kind, momentum=momentum)
    made = step(options, held(options, 1.0, torch.float32))
    for role in made[1]:
        lines = list(rule_of(kind).equations(segment(options, role, made)))
        first = sum(lines[0].right[name] * term for name, term in lines[0].terms.items())
        torch.testing.assert_close(first, made[1][role], rtol=1e-5, atol=1e-7)
        assert lines[0].replaced == "" and all(line.replaced for line in lines[1:])


def test_free_runs_take_torchs_own_steps() -> None:
    options = Optimizer(kind="rmsprop", momentum=0.9)
    reference: Any = rule_of("rmsprop").reference_options(GROUP, options)
    p, old = vector(1), held(options, 1.0, torch.float32)
    state = rule_of("rmsprop").reference_state({"parameter": p, **old, "step": torch.tensor(3)})
    after = reference.after(state, vector(2))
    torch.testing.assert_close(after.parameter.double(), step(options, old)[1]["parameter"])
