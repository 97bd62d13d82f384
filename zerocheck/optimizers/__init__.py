"""Optimizers: what a step of each computes, and what can go wrong in it.

- `adagrad/`: Adagrad and RMSprop
- `adamw/`: AdamW, and Adam
- `changes.py`: changes of a step: other inputs, options and states
- `coupled_decay.py`: weight decay that is added to the gradient, with its round-off
- `muon/`: Muon for matrices, with AdamW for all else
- `sgd/`: SGD with momentum
- `specification.py`: interface of an optimizer
- `state_shape.py`: shapes of states, those of rows and columns among them
- `trial.py`: test that a class is an optimizer that is known, run alone on one whole tensor
- `unsharded/`: optimizers of torch that are their own reference
- `user/`: user's own class, which is its own reference in a process apart
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch

from ..case.schema import Optimizer, OptimizerKind, UserOptimizer
from .adagrad.optimizer import Adagrad, RMSprop
from .adamw.adam import Adam
from .adamw.optimizer import AdamW
from .muon.optimizer import Muon
from .muon.pair import MuonWithAdamW
from .sgd.optimizer import SGD
from .specification import OptimizerSpecification, StateRole, UpdateRule
from .unsharded.catalogue import UNSHARDED
from .user.optimizer import User

_ADAMW = AdamW()

OPTIMIZERS: dict[OptimizerKind, OptimizerSpecification] = {
    "adamw": _ADAMW,
    "sgd": SGD(),
    "muon": MuonWithAdamW(Muon(), _ADAMW),
    "adam": Adam(),
    "adagrad": Adagrad(),
    "rmsprop": RMSprop(),
    **{one.kind: one for one in UNSHARDED},
}
"""All that zerocheck brings, by their name in cases."""

RULES: tuple[UpdateRule, ...] = tuple(
    dict.fromkeys(rule for one in OPTIMIZERS.values() for rule in one.rules)
)
"""Rules of all optimizers."""

BY_EQUATIONS: tuple[UpdateRule, ...] = tuple(rule for rule in RULES if not rule.itself)
"""Rules whose step is judged by its equations: nothing is run again."""

*_SOME, _LAST = (rule.name for rule in BY_EQUATIONS if not rule.whole)
NAMES_BY_EQUATIONS = f"{', '.join(_SOME)} and {_LAST}"
"""Names of those that compute element by element: `"AdamW, SGD and Adam"`."""

STATES: tuple[StateRole, ...] = tuple(
    dict.fromkeys(role for one in OPTIMIZERS.values() for role in one.states)
)
"""Roles of the states of all optimizers that have the shape of their parameter."""


SCALAR_NAMES = frozenset(name for rule in RULES for name in rule.scalar_names)
"""Names of states of all optimizers that are one number, other than the step count."""

__all__ = [
    "BY_EQUATIONS",
    "NAMES_BY_EQUATIONS",
    "OPTIMIZERS",
    "RULES",
    "SCALAR_NAMES",
    "STATES",
    "OptimizerSpecification",
    "StateRole",
    "UpdateRule",
    "factored",
    "known_optimizer",
    "most_states",
    "optimizer_of",
    "rule_of",
    "state_elements",
    "states_of",
]


def optimizer_of(options: Optimizer) -> OptimizerSpecification:
    """Return the optimizer of a case."""
    return OPTIMIZERS[options.kind] if options.user is None else _user(options.user)


@cache
def _user(user: UserOptimizer) -> User:
    return User(user)


def states_of(options: Optimizer) -> tuple[StateRole, ...]:
    """Return the roles of the states that the optimizer of a case has with its options."""
    return optimizer_of(options).states_with(options)


def most_states(options: Optimizer) -> int:
    """Return the number of states of a parameter that has most of them."""
    return max(len(rule.states_with(options)) for rule in optimizer_of(options).rules)


def factored(options: Optimizer) -> bool:
    """Return True if a state of the optimizer has one value for several elements of a parameter."""
    optimizer = optimizer_of(options)
    shapes = [r.state_shape(role, d) for r in optimizer.rules for role in r.states for d in (1, 2)]
    return any(shape is not None and shape.reduced for shape in shapes)


def state_elements(options: Optimizer, name: str, shape: Sequence[int]) -> dict[StateRole, int]:
    """Return the number of elements of each state of a parameter."""
    rule = rule_of(options, name, shape)
    found = {role: rule.state_shape(role, len(shape)) for role in rule.states_with(options)}
    return {role: math.prod(one.of(shape)) for role, one in found.items() if one is not None}


def rule_of(options: Optimizer, name: str, shape: Sequence[int]) -> UpdateRule:
    """Return the rule by which a case's optimizer updates the parameter of this name."""
    return optimizer_of(options).rule(options, name, shape)


def known_optimizer(
    optimizer: torch.optim.Optimizer, among: Sequence[UpdateRule] = RULES
) -> UpdateRule | None:
    """Return the rule of an object of torch, or of a subclass; None for others.

    torch's AdamW is a subclass of its Adam: the nearest class counts, and then what looks like it.
    """
    for kind in type(optimizer).__mro__:
        for one in among:
            if kind is one.torch_class:
                return one
    return next((one for one in among if isinstance(optimizer, one.lookalikes)), None)
