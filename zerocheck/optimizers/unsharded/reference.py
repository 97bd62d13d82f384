"""State and options of an optimizer of torch for the trainer of free runs.

Free runs inform and do not judge: the optimizer runs in the dtype of the trainer, as torch has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from zerocheck_reference import OptimizerState

from .step import UnshardedScalars, run


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
    """Options of a group of torch's optimizer. options: all but the learning rate."""

    lr: float
    torch_class: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    states: tuple[str, ...]
    scalar_states: Callable[[Mapping[str, Any], int], dict[str, torch.Tensor]]

    def initial(self, parameter: torch.Tensor) -> UnshardedState:
        """Return the state before the first step."""
        zeros = {role: torch.zeros_like(parameter) for role in self.states}
        return UnshardedState(parameter, zeros, 0)

    def check(self, state: OptimizerState) -> None:
        """Raise ValueError for a state of another optimizer."""
        given = cast(UnshardedState, state)
        if set(given.states) != set(self.states):
            raise ValueError(f"states are {sorted(given.states)} (allowed: {sorted(self.states)})")

    def after(self, state: OptimizerState, gradient: torch.Tensor) -> UnshardedState:
        """Return the state after one step."""
        given, options = cast(UnshardedState, state), {**self.options, "lr": self.lr}
        scalars = UnshardedScalars(
            self.torch_class,
            options,
            self.states,
            given.count,
            self.scalar_states(options, given.count),
            {},
            estimated=False,
        )
        made = run(given.parameter, gradient, given.states, scalars)
        return UnshardedState(made.pop("parameter"), made, given.count + 1)
