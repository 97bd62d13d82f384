"""Update to judge, and the optimizer with its options that must have made it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..case.schema import Case, Optimizer
from ..case.segments import end_of
from ..contract.groups import SCHEDULE_PERIOD, learning_rates
from ..floating_point import Format
from ..optimizers import optimizer_of
from ..optimizers.specification import OptimizerSpecification, Reading, UpdateElements
from .compare import Misfit
from .layout import Elements
from .pieces import Positions
from .state import State, float64


class Update(NamedTuple):
    """One update to judge.

    gradient: the vector the optimizer was given (clipped, if the case clips); error: what is not
    known of it, 0 where it was observed; lr: per group; has: per parameter, whether it has a
    gradient; for the diagnosis only: unclipped, the gradient before clipping; previous, asked for
    what the optimizer was to be given in the step before; others, asked for (cause, gradient) of
    known mistakes in a reduction.
    """

    before: State
    after: State
    gradient: torch.Tensor
    error: torch.Tensor | float
    lr: Sequence[float]
    has: Sequence[bool]
    unclipped: torch.Tensor | None = None
    previous: Callable[[], torch.Tensor | None] = lambda: None
    others: Callable[[], Iterable[tuple[str, torch.Tensor]]] = tuple


class UpdateRecipe(NamedTuple):
    """Optimizer with its options; rates: of all steps, by group, for the diagnosis.

    They are those of later steps too: a schedule may have gone on too far.
    """

    optimizer: OptimizerSpecification
    options: Optimizer
    rates: Sequence[Sequence[float]]
    microbatches: int = 1

    @classmethod
    def of(cls, case: Case) -> UpdateRecipe:
        """Return the options of a case."""
        options = case.optimizer
        steps = [learning_rates(case, index) for index in range(max(end_of(case), SCHEDULE_PERIOD))]
        rates = [[step[number] for step in steps] for number in range(len(options.groups))]
        return cls(optimizer_of(options), options, rates, case.training.microbatches)

    def signed(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient that a step computes with, negated where the optimizer maximizes."""
        return -gradient if self.options.maximize else gradient

    def scalars(self, group: int, *, lr: float, step: int, reading: Reading) -> Any:
        """Compute the scalars of a group at its update number `step`."""
        options = self.options
        return self.optimizer.scalars(
            options.groups[group], options, lr=lr, step=step, reading=reading
        )

    def elements(
        self, update: Update, elements: Positions | None, format: Format
    ) -> UpdateElements:
        """Return some elements of an update, as the optimizer takes them."""
        before, after, error = update.before, update.after, update.error
        roles = self.optimizer.states_with(self.options)
        return UpdateElements(
            float64(before.parameter, elements),
            self.signed(float64(update.gradient, elements)),
            before.values(roles, elements),
            after.values(roles, elements),
            float64(error, elements) if isinstance(error, torch.Tensor) else error,
            format,
        )


class WrongRole(NamedTuple):
    """Role that is wrong in the elements of one parameter group."""

    role: str
    misfit: Misfit
    elements: Elements
    group: int
    steps: int
    format: Format
