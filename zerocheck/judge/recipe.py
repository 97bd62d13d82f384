"""Update to judge, and the optimizer with its options that must have made it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..case.schema import Case, Optimizer
from ..case.segments import end_of
from ..contract.groups import SCHEDULE_PERIOD, learning_rates
from ..floating_point import Format
from ..optimizers import optimizer_of
from ..optimizers.specification import OptimizerSpecification, Reading, UpdateElements, UpdateRule
from . import vectors
from .compare import Misfit
from .layout import KernelRange, ParameterLayout, ParameterPlace
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


class RuleRange(NamedTuple):
    """Elements that one rule updates with one set of scalars.

    place: the parameter that they are the whole of, for a rule that is judged one by one.
    """

    rule: UpdateRule
    range: KernelRange
    place: ParameterPlace | None = None


class UpdateRecipe(NamedTuple):
    """Optimizer with its options; rates: of all steps, by group, for the diagnosis.

    They are those of later steps too: a schedule may have gone on too far.
    """

    optimizer: OptimizerSpecification
    options: Optimizer
    rates: Sequence[Sequence[float]]
    microbatches: int = 1
    ranks: Sequence[int] = ()
    """Numbers of ranks that parameters may be sharded over, for the diagnosis."""

    @classmethod
    def of(cls, case: Case) -> UpdateRecipe:
        """Return the options of a case."""
        options = case.optimizer
        steps = [learning_rates(case, index) for index in range(max(end_of(case), SCHEDULE_PERIOD))]
        rates = [[step[number] for step in steps] for number in range(len(options.groups))]
        ranks = tuple(dict.fromkeys((case.axes.parts("parameters"), case.world_size)))
        return cls(optimizer_of(options), options, rates, case.training.microbatches, ranks)

    def signed(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient that a step computes with, negated where the optimizer maximizes."""
        return -gradient if self.options.maximize else gradient

    def ranges(self, layout: ParameterLayout, keys: Sequence[int | None]) -> Iterator[RuleRange]:
        """Iterate over the elements of parameters with a key, as `ParameterLayout.segments`."""
        rules = self.optimizer.rules
        if len(rules) == 1 and not rules[0].one_by_one:
            for part in layout.segments(keys):
                yield RuleRange(rules[0], part)
            return
        of = [self.rule(place) for place in layout.places]
        for rule in rules:
            mine = [key if one is rule else None for key, one in zip(keys, of, strict=True)]
            if not rule.one_by_one:
                for part in layout.segments(mine):
                    yield RuleRange(rule, part)
                continue
            for place, key in zip(layout.places, mine, strict=True):
                if key is not None:
                    elements = vectors.ranges([place.start], [place.stop - place.start])
                    part = KernelRange(place.group, key, place.format, elements)
                    yield RuleRange(rule, part, place)

    def rule(self, place: ParameterPlace) -> UpdateRule:
        """Return the rule by which a parameter is updated."""
        return self.optimizer.rule(self.options, place.name, place.shape)

    def scalars(
        self, rule: UpdateRule, group: int, *, lr: float, step: int, reading: Reading
    ) -> Any:
        """Compute the scalars of a group at its update number `step`."""
        options = self.options
        return rule.scalars(options.groups[group], options, lr=lr, step=step, reading=reading)

    def elements(
        self,
        update: Update,
        rule: UpdateRule,
        elements: Positions | None,
        format: Format,
        place: ParameterPlace | None = None,
    ) -> UpdateElements:
        """Return some elements of an update, as a rule takes them. place: see `RuleRange`."""
        before, after, error = update.before, update.after, update.error
        roles = rule.states_with(self.options)
        return UpdateElements(
            float64(before.parameter, elements),
            self.signed(float64(update.gradient, elements)),
            before.values(roles, elements),
            after.values(roles, elements),
            float64(error, elements) if isinstance(error, torch.Tensor) else error,
            format,
            () if place is None else place.shape,
            None if place is None else place.strides,
            held=place is not None
            and any(place.name in before.present.get(role, ()) for role in roles),
            parts=max(self.ranks, default=1),
        )


class WrongRole(NamedTuple):
    """Role that is wrong in elements that one rule updates."""

    role: str
    misfit: Misfit
    part: RuleRange
