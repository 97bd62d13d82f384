"""Optimizer of torch whose reference is itself, run unsharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ... import causes as bugs
from ...case.schema import Group, Optimizer, OptimizerKind
from ...floating_point import Enclosure
from ..specification import (
    OptimizerTrial,
    OptionFields,
    Reading,
    StateRole,
    UpdateElements,
    UpdateRule,
)
from ..state_shape import ShapeOf, StateShape
from . import step
from .changes import changes
from .reference import UnshardedOptions
from .step import UnshardedScalars

LARGEST = 100.0
"""Gradients that drawn states are made of: squares of larger ones leave the numbers of bf16."""

RELATIVE: Mapping[StateRole, Callable[[float, float], float]] = {
    "exp_avg": lambda scale, lr: scale,
    "exp_avg_sq": lambda scale, lr: scale**2,
    "exp_inf": lambda scale, lr: scale,
    "sum": lambda scale, lr: scale**2,
    "square_avg": lambda scale, lr: scale**2,
    "row_var": lambda scale, lr: scale**2,
    "col_var": lambda scale, lr: scale**2,
    "variance": lambda scale, lr: scale**2,
    "acc_delta": lambda scale, lr: lr**2,
    "momentum_buffer": lambda scale, lr: scale,
    "prev": lambda scale, lr: scale,
    "step_size": lambda scale, lr: lr,
    "ax": lambda scale, lr: 1.0,
}
"""Size of a state, from that of the gradients and the learning rate."""

SIGNED: frozenset[StateRole] = frozenset(("exp_avg", "momentum_buffer", "prev"))
"""States that have both signs; `ax` has those of the parameter."""


class Unsharded(UpdateRule):
    """Optimizer of torch that counts its steps: elementwise, or with factored states."""

    lookalikes: tuple[type[torch.optim.Optimizer], ...] = ()
    hidden: tuple[StateRole, ...] = ()
    counts_steps = True
    itself = True
    recovers = False
    readings: tuple[Reading, ...] = ("same kernels", "estimated")

    def __init__(
        self,
        kind: OptimizerKind,
        torch_class: type[torch.optim.Optimizer],
        states: tuple[StateRole, ...],
        fields: OptionFields,
        options: Callable[[Group, Optimizer], dict[str, Any]],
        *,
        optional: Callable[[Optimizer], tuple[StateRole, ...]] = lambda options: (),
        scalar_states: Callable[[Mapping[str, Any], int], dict[str, torch.Tensor]] = (
            lambda group, count: {}
        ),
        scalar_names: tuple[str, ...] = (),
        states_at_once: bool = False,
        fused: bool = False,
        state_shape: ShapeOf | None = None,
    ) -> None:
        """Describe it.

        options: of a group, by torch's names; optional: states that it has with some options;
        scalar_states(group of torch, steps taken): states that are one number; fused: it has a
        fused kernel on the CPU; state_shape: of one with factored states, which needs whole
        parameters.
        """
        self.kind = kind
        self.name = torch_class.__name__
        self.torch_class = torch_class
        self.states = (*states, *(r for r in optional(_ALL) if r not in states))
        self.fields = fields
        self.whole = self.one_by_one = state_shape is not None
        self._state_shape = state_shape
        of_matrices = tuple(role for role in states if self.state_shape(role, 2) is not None)
        self.trial = OptimizerTrial({"lr": 2.0**-6}, of_matrices)
        self._states = states
        self._options = options
        self._optional = optional
        self._scalar_states = scalar_states
        self.scalar_names = scalar_names
        self.states_at_once = states_at_once
        self._fused = fused

    def states_with(self, options: Optimizer) -> tuple[StateRole, ...]:
        """Return the states that it has with these options."""
        return (*self._states, *self._optional(options))

    def state_shape(self, role: str, dims: int) -> StateShape | None:
        """Return the parameter's shape, unless the states are factored."""
        return (self._state_shape or super().state_shape)(role, dims)

    def read_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a case in a group. Adafactor's eps is the first of two numbers."""
        found = super().read_group(group)
        if isinstance(found.get("eps"), tuple) and self.kind == "adafactor":
            found["eps"] = found["eps"][0]
        return {name: value for name, value in found.items() if value is not None}

    def swaps(self, role: str) -> Sequence[tuple[str, str]]:
        """Return each other state: any of them can be loaded in its place."""
        return [(bugs.MOMENTS_SWAPPED, other) for other in self.states if other != role]

    def torch_group(self, group: Group, options: Optimizer) -> dict[str, Any]:
        """Return the options of a parameter group of torch's optimizer."""
        fused = {"fused": options.kernel == "fused"} if self._fused else {}
        foreach = options.kernel == "foreach" or (options.kernel == "fused" and not self._fused)
        return {
            "lr": group.lr,
            **self._options(group, options),
            "maximize": options.maximize,
            "foreach": foreach,
            **fused,
        }

    def size_of(self, role: str, scale: float) -> float:
        """Return the size of a state, as of gradients up to LARGEST and a rate of 1e-3."""
        return RELATIVE[role](min(scale, LARGEST), 1e-3)

    def drawn(
        self, parameter: torch.Tensor, options: Optimizer, scale: float, generator: torch.Generator
    ) -> dict[StateRole, torch.Tensor]:
        """Draw states in mid-training: means of both signs, others between 0.1 and 1 of their size.

        An average of parameters is the parameter; a step size is not 0, whatever the gradients.
        """
        found: dict[StateRole, torch.Tensor] = {}
        for role in self.states_with(options):
            size = RELATIVE[role](min(scale, LARGEST), options.groups[0].lr)
            low = -1.0 if role in SIGNED else 0.1
            shape = self.state_shape(role, parameter.dim())
            if shape is None:
                continue
            drawn = shape.empty(parameter).uniform_(low, 1.0, generator=generator).mul_(size)
            whole = shape.expanded(drawn, parameter.shape).contiguous()
            found[role] = parameter.clone() if role == "ax" else whole
        return found

    def scalars(
        self, group: Group, options: Optimizer, *, lr: float, step: int, reading: Reading
    ) -> Any:
        """Return the options of a group for one step."""
        return self.torch_scalars(group, options, lr=lr, step=step, reading=reading)

    def torch_scalars(
        self, group: Group, options: Optimizer, *, lr: float, step: int, reading: Reading
    ) -> UnshardedScalars:
        """Return the options of a group for one step of torch's own."""
        given = {**self.torch_group(group, options), "lr": lr, "maximize": False}
        return UnshardedScalars(
            self.torch_class,
            given,
            self.states_with(options),
            step - 1,
            self._scalar_states(given, step - 1),
            self._scalar_states(given, 0),
            reading == "estimated",
            self.state_shape,
            self.whole,
        )

    def scalar_states(self, group: Mapping[str, Any], count: int) -> dict[str, torch.Tensor]:
        """Return the states that are one number, after `count` steps with this group of torch."""
        return self._scalar_states(group, count)

    def enclosures(self, elements: UpdateElements, scalars: Any) -> Iterator[tuple[str, Enclosure]]:
        """Enclose the states and the parameter by running the step on whole vectors."""
        yield from step.enclosures(elements, scalars).items()

    changes = staticmethod(changes)

    def reference_options(self, group: Group, options: Optimizer) -> UnshardedOptions:
        """Return the options of a group for free runs."""

        def scalars(lr: float, step: int) -> UnshardedScalars:
            made = self.torch_scalars(group, options, lr=lr, step=step, reading="same kernels")
            # A trainer gives the gradient as it is.
            return (made.with_options(maximize=True) if options.maximize else made).one_by_one()

        def roles(dims: int) -> tuple[StateRole, ...]:
            held = self.states_with(options)
            return tuple(role for role in held if self.state_shape(role, dims) is not None)

        return UnshardedOptions(group.lr, roles, scalars)


_ALL = Optimizer(amsgrad=True, momentum=0.5)
"""Options with which an optimizer has all of its states."""
