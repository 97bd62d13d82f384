"""Steps of torch's optimizers on shards lie in what the same class gives unsharded."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from zerocheck.case.schema import Group, Optimizer
from zerocheck.floating_point import Format
from zerocheck.judge.compare import compare
from zerocheck.optimizers.specification import Reading, UpdateElements
from zerocheck.optimizers.unsharded.catalogue import UNSHARDED
from zerocheck.optimizers.unsharded.optimizer import Unsharded

SIZE = 203
CUTS = ((0, 50, 101, 203), (0, 203), (0, 1, 2, 202, 203))
"""Where shards begin and end; kernels treat the last elements of each otherwise."""
GROUP = Group(lr=0.01, eps=1e-6, weight_decay=0.1)
BY_KIND = pytest.mark.parametrize("rule", UNSHARDED, ids=[rule.kind for rule in UNSHARDED])
ELEMENTWISE = [rule for rule in UNSHARDED if not rule.whole]
BY_ELEMENTWISE = pytest.mark.parametrize("rule", ELEMENTWISE, ids=[r.kind for r in ELEMENTWISE])


def _options(rule: Unsharded, kernel: str, *, maximize: bool = False) -> Optimizer:
    more: dict[str, Any] = {"amsgrad": True} if rule.kind == "adam" else {}
    if rule.kind == "rmsprop":
        more["momentum"] = 0.5
    return Optimizer(kind=rule.kind, kernel=kernel, maximize=maximize, **more)  # type: ignore[arg-type]


def _drawn(
    rule: Unsharded, options: Optimizer, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(parameter, gradient, states) in mid-training."""
    generator = torch.Generator().manual_seed(seed)
    p, g = (torch.empty(SIZE).normal_(generator=generator) for _ in range(2))
    g *= 10.0 ** float(torch.randint(-6, 3, (), generator=generator))
    states = rule.drawn(p, options, float(g.abs().mean()), generator)
    return p.to(dtype), g.to(dtype), {role: state.to(dtype) for role, state in states.items()}


def _sharded(
    rule: Unsharded,
    options: Optimizer,
    p: torch.Tensor,
    g: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    count: int,
    cuts: Sequence[int],
) -> dict[str, torch.Tensor]:
    """Take one step on each shard by itself, all in one optimizer, as a rank would."""
    pieces = [slice(*ends) for ends in itertools.pairwise(cuts)]
    held = [torch.nn.Parameter(p[piece].clone()) for piece in pieces]
    group = rule.torch_group(GROUP, options)
    made: Any = rule.torch_class
    optimizer = made([{**group, "params": held}])
    for piece, parameter in zip(pieces, held, strict=True):
        parameter.grad = g[piece].clone()
        if count:
            optimizer.state[parameter] = {
                "step": torch.tensor(float(count)),
                **{role: state[piece].clone() for role, state in states.items()},
                **rule.scalar_states(group, count),
            }
    optimizer.step()
    roles = rule.states_with(options)
    found = {role: torch.cat([optimizer.state[one][role] for one in held]) for role in roles}
    return {**found, "parameter": torch.cat([one.detach() for one in held])}


def _outside(
    rule: Unsharded,
    options: Optimizer,
    p: torch.Tensor,
    g: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    count: int,
    after: Mapping[str, torch.Tensor],
    reading: Reading = "estimated",
) -> list[str]:
    """Roles with an element that is not in its enclosure."""
    old = states if count else {role: torch.zeros_like(p) for role in rule.states_with(options)}
    elements = UpdateElements(
        p.double(),
        (-g if options.maximize else g).double(),
        {role: state.double() for role, state in old.items()},
        {},
        format=Format.of(p.dtype),
    )
    scalars = rule.scalars(GROUP, options, lr=GROUP.lr, step=count + 1, reading=reading)
    return [
        role
        for role, enclosure in rule.enclosures(elements, scalars)
        if compare(after[role].double(), enclosure)[1] is not None
    ]


@pytest.mark.every(3)
@BY_ELEMENTWISE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernel", ["for-loop", "foreach", "fused"])
def test_shards_step_as_the_whole(rule: Unsharded, dtype: torch.dtype, kernel: str) -> None:
    for seed in range(12):
        options = _options(rule, kernel, maximize=seed % 2 == 1)
        p, g, states = _drawn(rule, options, dtype, seed)
        count = (0, 1, 255)[seed % 3]
        after = _sharded(rule, options, p, g, states, count, CUTS[seed % 3])
        assert _outside(rule, options, p, g, states, count, after) == [], seed


@BY_ELEMENTWISE
def test_a_step_in_one_piece_has_the_same_bits(rule: Unsharded) -> None:
    options = _options(rule, "foreach")
    p, g, states = _drawn(rule, options, torch.float32, 5)
    after = _sharded(rule, options, p, g, states, 10, (0, SIZE))
    assert _outside(rule, options, p, g, states, 10, after, "same kernels") == []


@BY_ELEMENTWISE
def test_a_wrong_element_is_outside(rule: Unsharded) -> None:
    """By 1 % of the step of an element, or of a state."""
    options = _options(rule, "foreach")
    p, g, states = _drawn(rule, options, torch.float32, 3)
    after = _sharded(rule, options, p, g, states, 10, (0, SIZE))
    before = {**states, "parameter": p}
    for role in (*rule.states_with(options), "parameter"):
        change = (after[role] - before[role]).abs()
        at = int(change.argmax())
        if not float(change[at]):
            continue
        wrong = {**after, role: after[role].clone()}
        wrong[role][at] += 0.01 * change[at]
        assert role in _outside(rule, options, p, g, states, 10, wrong), role


@pytest.mark.parametrize("count", [0, 1, 2, 255, 10_000])
@pytest.mark.parametrize("kind", ["nadam", "asgd"])
def test_states_that_are_one_number_are_those_of_torch(kind: str, count: int) -> None:
    """Of as many steps with gradients of zeros, whose options are those of the group."""
    (rule,) = (rule for rule in UNSHARDED if rule.kind == kind)
    group = {**rule.torch_group(Group(lr=0.01), Optimizer(kind=rule.kind)), "foreach": False}
    made: Any = rule.torch_class
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = made([{**group, "params": [parameter]}])
    parameter.grad = torch.zeros(1)
    for _ in range(min(count, 300)):
        optimizer.step()
    wanted = rule.scalar_states(group, min(count, 300))
    for name, value in wanted.items() if count else ():
        assert float(optimizer.state[parameter][name]) == float(value), name
    assert all(value.dim() == 0 for value in rule.scalar_states(group, count).values())


@BY_KIND
def test_the_reference_takes_the_same_steps(rule: Unsharded) -> None:
    options = _options(rule, "for-loop")
    p, g, _ = _drawn(rule, options, torch.float32, 2)
    reference = rule.reference_options(GROUP, options)
    state = reference.initial(p.double().view(7, 29))
    reference.check(state)
    for _ in range(3):
        state = reference.after(state, g.double().view(7, 29))
    made: Any = rule.torch_class
    parameter = torch.nn.Parameter(p.double().view(7, 29))
    optimizer = made([{**rule.torch_group(GROUP, options), "params": [parameter]}])
    for _ in range(3):
        parameter.grad = g.double().view(7, 29)
        optimizer.step()
    torch.testing.assert_close(state.parameter, parameter.detach(), rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="allowed"):
        reference.check(type(state)(state.parameter, {"none": p}, 0))  # type: ignore[call-arg]
