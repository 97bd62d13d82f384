"""Test that an optimizer is the one of a case, run alone on one whole tensor before any step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
from msgspec.structs import replace

from ..case.schema import Group, Optimizer
from ..errors import UsageError
from . import OPTIMIZERS, known_optimizer
from .specification import OptimizerSpecification, UpdateRule
from .user.optimizer import User

SHAPE = (64, 128)
"""Shape of the tensor that is tried: large enough for libraries that quantize larger states
only."""
STEPS = 3


def template_of(
    optimizer: torch.optim.Optimizer, keys: Mapping[str, str], wanted: OptimizerSpecification
) -> dict[str, Any] | None:
    """Return the state that the optimizer makes of one parameter.

    None for classes of torch, whose state is known, and for a class that cannot be made from its
    own defaults.

    keys: as in `States`; wanted: the optimizer of the case. Adam is accepted for AdamW: L2 in place
    of decoupled decay is a cause that the judge names. Raises UsageError for another optimizer.
    """
    kind = type(optimizer)
    known = known_optimizer(optimizer)
    if isinstance(wanted, User):
        mine = isinstance(optimizer, wanted.torch_class)
        if not mine and known is None:
            _check_states(optimizer, keys, wanted)
        if mine or known is None:
            return wanted.template()
    alike = tuple(kind for rule in wanted.rules for kind in rule.lookalikes)
    if known in wanted.rules or isinstance(optimizer, alike):
        return None
    name = kind.__name__
    if known is not None:
        raise UsageError(
            f"Built.optimizer is {name}, and the cases of this run have {wanted.name}: check it "
            f"with --optimizer {known.kind}, or fix optimizer.kind to {known.kind!r}"
        )
    if f"{kind.__module__}.".startswith("torch.optim."):
        raise UsageError(f"Built.optimizer is {name}; {others(name)}")
    defaults = frozenset(optimizer.defaults)
    tries = [(rule, _tried(cast(Any, kind), defaults, cast(Any, rule))) for rule in wanted.rules]
    found = [(one.distance / rule.trial.close, rule, one) for rule, one in tries if one is not None]
    if not found:
        return None
    # Of two rules the one whose states it has.
    distance, rule, (state, off, compiled) = min(
        found, key=lambda one: (_lacks(one[2].state, keys, one[1]), one[0])
    )
    check_state(state, name, keys, rule)
    if compiled:
        raise UsageError(
            f"Built.optimizer is {name}, whose step calls torch.compile: how its kernels round is "
            "up to Inductor, so that there is no bound to judge it by; needed is one that is not "
            "compiled"
        )
    if distance > 1:
        raise UsageError(
            f"Built.optimizer is {name}, which is not {wanted.name}: alone, on one tensor, its "
            f"update after {STEPS} steps is off by {100 * off:.2g}% of {rule.name}'s; "
            + others(name)
        )
    return dict(state)


def _check_states(optimizer: torch.optim.Optimizer, keys: Mapping[str, str], wanted: User) -> None:
    """Raise UsageError for a class with other states than the user's optimizer of the case.

    A class that cannot be made alone, as a sharded one may be, is left to its steps.
    """
    made: Any = type(optimizer)
    try:
        parameter = torch.nn.Parameter(torch.ones(SHAPE))
        alone = made([parameter])
        parameter.grad = torch.ones(SHAPE)
        with torch.enable_grad():
            alone.step()
        state = dict(alone.state[parameter])
    except Exception:
        return
    check_state(state, made.__name__, keys, wanted)


def _lacks(state: Mapping[str, Any], keys: Mapping[str, str], rule: UpdateRule) -> int:
    """Return the number of a rule's states that are not in a state."""
    return sum(keys.get(role, role) not in state for role in rule.trial.states)


def others(name: str) -> str:
    """Say in words how the user's optimizer `name` is judged, and which optimizers are known."""
    known = ", ".join(f"{one.name} (--optimizer {kind})" for kind, one in OPTIMIZERS.items())
    return (
        f"to judge {name} by itself, unsharded: --optimizer path/to/file.py:{name}; other "
        f"optimizers that zerocheck judges: {known}"
    )


def check_state(
    state: Mapping[str, Any], name: str, keys: Mapping[str, str], wanted: UpdateRule
) -> None:
    """Raise UsageError for a state of an optimizer `name` that is not the wanted one's, in fp32."""
    roles = wanted.trial.states
    needed = [keys.get(role, role) for role in roles]
    missing = [key for key in needed if not isinstance(state.get(key), torch.Tensor)]
    if missing:
        held = ", ".join(map(repr, state)) or "nothing"
        named = ", ".join(f'"{role}": ...' for role in (*roles, *["step"] * wanted.counts_steps))
        raise UsageError(
            f"Built.optimizer is {name}, whose state has {held}, and no {' or '.join(missing)}; "
            f"if it is {wanted.name} by other names, say which: Built(..., roles={{{named}}}); "
            f"{others(name)}"
        )
    for key in needed:
        tensor = state[key]
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not plain or tensor.dtype not in (torch.float32, torch.bfloat16):
            what = f"of dtype {tensor.dtype}" if plain else f"a {type(tensor).__name__}"
            raise UsageError(
                f"Built.optimizer is {name}, whose {key} is {what}: quantized states are not "
                "supported; needed are states in torch.float32 or torch.bfloat16"
            )


class TrialSteps(NamedTuple):
    """Result of a few steps.

    distance: largest error of the path, relative to that of the wanted optimizer; compiled: True if
    it called torch.compile.
    """

    state: dict[str, Any]
    distance: float
    compiled: bool


@cache
def _tried(
    kind: type[torch.optim.Optimizer], defaults: frozenset[str], wanted: UpdateRule
) -> TrialSteps | None:
    """Try a few steps. None if the class cannot be made or fails alone.

    defaults: names of the options of a group.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.empty(SHAPE).uniform_(-0.25, 0.25, generator=generator)
    gradients = [torch.empty(SHAPE).normal_(generator=generator) for _ in range(STEPS)]
    parameter = torch.nn.Parameter(start.clone())
    known = inspect.signature(kind).parameters
    trial = wanted.trial.options
    options = {name: trial[name] for name in trial if name in known and name in defaults}
    compiled: list[object] = []
    with torch.enable_grad(), mock.patch.object(torch, "compile", partial(_uncompiled, compiled)):
        try:
            optimizer = kind([parameter], **options)
            training = getattr(optimizer, "train", None)
            if callable(training):  # as schedule-free ones want it
                training()
            for gradient in gradients:
                parameter.grad = gradient.clone()
                optimizer.step()
            state = dict(optimizer.state[parameter])
            group = optimizer.param_groups[0]
        except Exception:
            return None
    off = _off(start, gradients, parameter.detach(), group, wanted)
    return TrialSteps(state, off, bool(compiled))


def _uncompiled(asked: list[object], function: Any = None, **options: Any) -> Any:
    """Stand-in for torch.compile that records a call, and compiles nothing."""
    asked.append(function)
    return (lambda given: given) if function is None else function


def _off(
    start: torch.Tensor,
    gradients: list[torch.Tensor],
    after: torch.Tensor,
    group: Mapping[str, Any],
    one: UpdateRule,
) -> float:
    """Largest error of the path from `start` to `after`, relative to the longest of the reference.

    Infinite where an option of that name is something else than the wanted optimizer's.
    """
    try:
        given: dict[str, Any] = {"eps": 0.0, "weight_decay": 0.0, **one.read_group(group)}
        of_group = replace(Group(), **{n: float(given[n]) for n in one.fields.group if n in given})
        options = Optimizer(
            kind=one.kind, **{name: given[name] for name in one.fields.optimizer if name in given}
        )
        reference = one.reference_options(of_group, options)
    except (TypeError, ValueError):
        return math.inf
    state = reference.initial(start.double())
    for gradient in gradients:
        state = reference.after(state, gradient.double())
    way = (state.parameter - start).abs().max()
    return float((after.double() - state.parameter).abs().max() / way)
