"""Optimizers: what a step of each computes, and what can go wrong in it.

- `adamw/`: AdamW
- `inputs.py`: gradients that a step may be given in place of the right one
- `sgd/`: SGD with momentum
- `specification.py`: interface of an optimizer
- `trial.py`: test that a class is an optimizer that is known, run alone on one whole tensor
"""

from __future__ import annotations

import torch

from ..case.schema import Optimizer, OptimizerKind
from .adamw.optimizer import AdamW
from .sgd.optimizer import SGD
from .specification import OptimizerSpecification, StateRole

OPTIMIZERS: dict[OptimizerKind, OptimizerSpecification] = {"adamw": AdamW(), "sgd": SGD()}
"""All of them, by their name in cases."""

STATES: tuple[StateRole, ...] = tuple(
    dict.fromkeys(role for one in OPTIMIZERS.values() for role in one.states)
)
"""Roles of the states of all optimizers that have the shape of their parameter."""


__all__ = [
    "OPTIMIZERS",
    "STATES",
    "OptimizerSpecification",
    "StateRole",
    "known_optimizer",
    "optimizer_of",
    "states_of",
]


def optimizer_of(options: Optimizer) -> OptimizerSpecification:
    """Return the optimizer of a case."""
    return OPTIMIZERS[options.kind]


def states_of(options: Optimizer) -> tuple[StateRole, ...]:
    """Return the roles of the states that the optimizer of a case has with its options."""
    return optimizer_of(options).states_with(options)


def known_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerSpecification | None:
    """Return the optimizer that an object of torch, or of a subclass, is; None for others."""
    for one in OPTIMIZERS.values():
        if isinstance(optimizer, (one.torch_class, *one.lookalikes)):
            return one
    return None
