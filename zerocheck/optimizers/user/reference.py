"""State and options of the user's optimizer for the trainer of free runs, which do not judge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from zerocheck_reference import OptimizerState

from ...case.schema import Group, Optimizer
from ...floating_point import Format
from ..specification import UpdateElements
from ..unsharded.reference import UnshardedState

if TYPE_CHECKING:
    from .optimizer import User


@dataclass(frozen=True)
class UserOptions:
    """Options of a group of the user's optimizer."""

    lr: float
    rule: User
    group: Group
    options: Optimizer

    def initial(self, parameter: torch.Tensor) -> UnshardedState:
        """Return the state before the first step."""
        zeros = {role: torch.zeros_like(parameter) for role in self.rule.states}
        return UnshardedState(parameter, zeros, 0)

    def check(self, state: OptimizerState) -> None:
        """Raise ValueError for a state of another optimizer."""
        given = cast(UnshardedState, state)
        if set(given.states) != set(self.rule.states):
            raise ValueError(
                f"states are {sorted(given.states)} (allowed: {sorted(self.rule.states)})"
            )

    def after(self, state: OptimizerState, gradient: torch.Tensor) -> UnshardedState:
        """Return the state after one step."""
        given = cast(UnshardedState, state)
        before = given.parameter
        scalars = self.rule.scalars(
            self.group, self.options, lr=self.lr, step=given.count + 1, reading="same kernels"
        )
        if self.options.maximize:
            scalars = scalars.with_options(maximize=True)
        elements = UpdateElements(
            before.double().reshape(-1),
            gradient.double().reshape(-1),
            {role: one.double().reshape(-1) for role, one in given.states.items()},
            {},
            format=Format(before.dtype, 0.0, 0.0),
            shape=tuple(before.shape),
            held=given.count > 0,
        )
        made = {
            role: one.exact.to(before).view_as(before)
            for role, one in self.rule.enclosures(elements, scalars)
        }
        return UnshardedState(made.pop("parameter"), made, given.count + 1)
