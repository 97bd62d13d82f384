"""State and options of such an optimizer for the trainer of free runs.

Free runs inform and do not judge: the optimizer runs in the dtype of the trainer, as torch has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch

from zerocheck_reference import OptimizerState

from ...floating_point import Format
from ..specification import UpdateElements
from .step import UnshardedScalars, enclosures


@dataclass(frozen=True)
class UnshardedState:
    """Parameter with its states by role, and the steps that it took."""

    parameter: torch.Tensor
    states: Mapping[str, torch.Tensor]
    count: int

    def copy(self) -> UnshardedState:
        """Return a state that shares no memory with this one."""
        states = {role: state.clone() for role, state in self.states.items()}
        return UnshardedState(self.parameter.detach().clone(), states, self.count)


@dataclass(frozen=True)
class UnshardedOptions:
    """Options of a group of an optimizer.

    states(dims): roles of a parameter with so many dims; scalars(lr, step): those of one step.
    """

    lr: float
    states: Callable[[int], tuple[str, ...]]
    scalars: Callable[[float, int], UnshardedScalars]

    def initial(self, parameter: torch.Tensor) -> UnshardedState:
        """Return the state before the first step."""
        zeros = {role: torch.zeros_like(parameter) for role in self.states(parameter.dim())}
        return UnshardedState(parameter, zeros, 0)

    def check(self, state: OptimizerState) -> None:
        """Raise ValueError for a state of another optimizer."""
        given = cast(UnshardedState, state)
        allowed = self.states(given.parameter.dim())
        if set(given.states) != set(allowed):
            raise ValueError(f"states are {sorted(given.states)} (allowed: {sorted(allowed)})")

    def after(self, state: OptimizerState, gradient: torch.Tensor) -> UnshardedState:
        """Return the state after one step."""
        given = cast(UnshardedState, state)
        before = given.parameter
        elements = UpdateElements(
            before.double().reshape(-1),
            gradient.double().reshape(-1),
            {role: one.double().reshape(-1) for role, one in given.states.items()},
            {},
            format=Format(before.dtype, 0.0, 0.0),
            shape=tuple(before.shape),
            held=given.count > 0,
        )
        found = enclosures(elements, self.scalars(self.lr, given.count + 1))
        made = {role: one.exact.to(before).view_as(before) for role, one in found.items()}
        return UnshardedState(made.pop("parameter"), made, given.count + 1)
