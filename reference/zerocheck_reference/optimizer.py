"""Interface of an optimizer to the trainer: options of a group, and the state of a parameter."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


class OptimizerState(Protocol):
    """All that an optimizer knows of one parameter, the parameter included."""

    @property
    def parameter(self) -> Tensor: ...

    def copy(self) -> OptimizerState:
        """Return a state that shares no memory with this one."""


@runtime_checkable
class OptimizerOptions(Protocol):
    """The scalars of an optimizer for one group of parameters: a frozen dataclass."""

    @property
    def lr(self) -> float: ...

    def initial(self, parameter: Tensor) -> OptimizerState:
        """Return the state before the first step."""

    def check(self, state: OptimizerState) -> None:
        """Raise ValueError unless `state` is a sound one of this optimizer with these options."""

    def after(self, state: OptimizerState, gradient: Tensor) -> OptimizerState:
        """Return the state after one step."""
