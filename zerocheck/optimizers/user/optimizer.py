"""Optimizer of the user's whose reference is its class, run on whole parameters elsewhere."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from ...case.schema import Group, Optimizer, OptimizerKind, UserOptimizer, UserState
from ...user_code import import_user_code
from ..specification import OptimizerTrial, OptionFields, Reading, StateRole
from ..state_shape import StateShape, shape_of_user_state
from ..unsharded.optimizer import LARGEST, Unsharded
from ..unsharded.step import COUNTS, UnshardedScalars, state_dtype
from . import process


class User(Unsharded):
    """Optimizer of the user's. Its class is imported in rank processes alone."""

    kind: OptimizerKind = "user"
    one_by_one = True

    def __init__(self, user: UserOptimizer) -> None:
        """Describe the optimizer of a case."""
        self.user = user
        self.name = user.location.rpartition(":")[2]
        self.states: tuple[StateRole, ...] = tuple(one.name for one in user.states)
        self.counts_steps = user.count != "none"
        self.whole = not user.elementwise
        self.counts_in_tensor = user.count == "tensor"
        self.counts_in_group = user.count == "group"
        names = ("lr", "weight_decay") if user.weight_decay else ("lr",)
        self.fields = OptionFields(names, ("maximize",) if user.maximize else ())
        of_matrices = tuple(one.name for one in user.states if one.of_matrices != "none")
        self.trial = OptimizerTrial({"lr": 2.0**-6}, of_matrices)
        self._of = {one.name: one for one in user.states}

    @cached_property
    def torch_class(self) -> type[torch.optim.Optimizer]:  # type: ignore[override]
        """The class. Runs the user's code."""
        found: type[torch.optim.Optimizer] = import_user_code(self.user.location)
        return found

    def states_with(self, options: Optimizer) -> tuple[StateRole, ...]:
        """Return its states: its options are those at inspection."""
        return self.states

    def torch_group(self, group: Group, options: Optimizer) -> dict[str, Any]:
        """Return the options of a parameter group of the class."""
        found: dict[str, Any] = {name: getattr(group, name) for name in self.fields.group}
        return {**found, "maximize": options.maximize} if self.user.maximize else found

    def template(self) -> dict[str, Any]:
        """Return a state as the class makes it, without elements."""
        counts: dict[str, dict[str, Any]] = {
            "int": {"step": 1},
            "float": {"step": 1.0},
            "none": {},
            "group": {},
        }
        count = counts.get(self.user.count, {"step": torch.empty(0)})
        return {**{name: torch.empty(0) for name in self.states}, **count}

    def counted(self, count: torch.Tensor) -> Any:
        """Return a step count of the type that its states have."""
        return COUNTS[self.user.count](int(count))

    def state_dtype(self, role: str, dtype: torch.dtype) -> torch.dtype:
        """Return fp32 for a state that is wide."""
        return state_dtype(self.user, role, dtype)

    def state_shape(self, role: str, dims: int) -> StateShape | None:
        """Return the shape that the state had at inspection."""
        return shape_of_user_state(self.user, role, dims)

    def size_of(self, role: str, scale: float) -> float:
        """Return the size of a state, as at inspection."""
        return _size(self._of[role], scale)

    def drawn(
        self, parameter: torch.Tensor, options: Optimizer, scale: float, generator: torch.Generator
    ) -> dict[StateRole, torch.Tensor]:
        """Draw states in mid-training, of the size and the signs that they had at inspection."""
        found: dict[StateRole, torch.Tensor] = {}
        for one in self.user.states:
            shape = self.state_shape(one.name, parameter.dim())
            if shape is None:
                continue
            drawn = shape.empty(parameter)
            drawn.uniform_(-1.0 if one.signed else 0.1, 1.0, generator=generator)
            whole = shape.expanded(drawn.mul_(_size(one, scale)), parameter.shape)
            found[one.name] = whole.contiguous()
        return found

    def torch_scalars(
        self, group: Group, options: Optimizer, *, lr: float, step: int, reading: Reading
    ) -> UnshardedScalars:
        """Return the options of a group for one step."""
        given = {**self.torch_group(group, options), "lr": lr}
        if self.user.maximize:
            given["maximize"] = False
        taken = max(step - 1, 0)
        estimated = reading == "estimated"
        return UnshardedScalars(
            None,
            given,
            self.states,
            taken,
            {},
            {},
            estimated,
            self.state_shape,
            self.whole,
            user=self.user,
            elsewhere=process.enclosures,
        )


def _size(state: UserState, scale: float) -> float:
    return float(state.size * min(scale, LARGEST) ** state.power)
