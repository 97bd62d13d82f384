"""Judging an optimizer that exposes no states by its parameters.

The start is known: moments of 0, no step taken. From then on the moments are enclosed, step after
step, by what the gradient can have been: it was seen, or it is the reference's, with its bound. The
parameters after a step must lie in the exact range of the update, which its optimizer knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import causes as bugs
from ..case.schema import Case
from ..contract.groups import learning_rates
from ..contract.semantics import Semantics
from ..errors import Unsupported
from ..floating_point import Enclosure
from ..optimizers.specification import Interval, Reading, Segment, UpdateElements, UpdateRule
from ..protocol.verdicts import Explanation, Violation
from .assemble import RoleState
from .compare import Misfit, compare, describe
from .diagnose.unwritten import unwritten
from .diagnose.update import explanation, fitting, unchanged
from .expected import Expected
from .hidden import as_shown
from .layout import KernelRange, ParameterLayout
from .local import Passes
from .pieces import Enclosing, Positions, pieces
from .recipe import UpdateRecipe
from .state import State


class HiddenUpdate(NamedTuple):
    """One update of an optimizer that exposes no states.

    gradient: what it was given, which has no width where it was seen; has: per parameter, whether
    it has a gradient; lr: per group; others: by name, gradients that a known bug would give it.
    """

    before: State
    after: State
    gradient: Enclosing
    has: Sequence[bool]
    lr: Sequence[float]
    others: Callable[[], Iterator[tuple[str, torch.Tensor]]] = lambda: iter(())


def wrong_gradients(
    passes: Passes | None, semantics: Semantics
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (cause, flat gradient) that known reduction bugs pass to an optimizer."""
    if passes is None or not passes.gradients.numel():
        return
    world, count = passes.gradients.shape[:2]
    divisor = count if semantics.divide == "gradient" else 1
    local = passes.gradients.double().sum(1) / divisor
    total = local.sum(0)
    if semantics.average == "mean":
        yield bugs.GRADIENT_TIMES_W, total
        yield bugs.GRADIENT_OVER_W, total / world**2
    for rank in range(world):
        yield bugs.LOCAL_GRADIENT_ONLY, local[rank]


class HiddenStates:
    """Enclosed moments of all parameters, carried from step to step."""

    def __init__(
        self, layout: ParameterLayout, recipe: UpdateRecipe, case: Case, semantics: Semantics
    ) -> None:
        self.layout = layout
        self.recipe = recipe
        self._case = case
        self._semantics = semantics
        self._lost = False
        (self._rule,) = _elementwise(recipe)
        self.readings: list[Reading] = list(self._rule.readings)
        self._states: dict[str, Interval] = {
            role: Interval(*(torch.zeros(layout.size, dtype=torch.float64) for _ in range(2)))
            for role in recipe.optimizer.hidden
        }
        self._counts = [0] * len(layout.places)

    def judged(
        self,
        before: State,
        after: State,
        applied: RoleState | None,
        expected: Expected | None,
        passes: Passes | None,
        *,
        step: int,
    ) -> tuple[float, Violation | None, State] | None:
        """Judge the update of a step, as `check` does; None if it cannot be judged.

        applied: the gradient that the optimizer was given, None if it was not shown; expected: what
        that must be, None if it is not known. Without both, the moments are lost for good.
        """
        if applied is not None:
            gradient = as_shown(applied)
            has = [place.name in applied.present for place in self.layout.places]
        elif expected is not None:
            zero = self._semantics.unused == "zero"
            gradient, has = expected.of, [zero or used for used in expected.used]
        else:
            self._lost = True
        if self._lost:
            return None
        rates = learning_rates(self._case, step)
        wrong = partial(wrong_gradients, passes, self._semantics)
        update = HiddenUpdate(before, after, gradient, has, rates, wrong)
        return self.check(update, step=step)

    def check(self, update: HiddenUpdate, *, step: int) -> tuple[float, Violation | None, State]:
        """Check an update: (share of the bound, violation or None, the state after).

        Where ranks hold different copies of a parameter, the one that is right becomes that of the
        state: which rank updates it, and whom it forgets to tell, is not known.
        """
        parts = self.layout.segments(self._keys(update))
        best: tuple[float, Misfit | None, KernelRange | None, State] | None = None
        for reading in self.readings:
            found = self._under(reading, parts, update)
            if best is None or found[1] is None:
                best = found
            if found[1] is None:
                self.readings = self.readings[self.readings.index(reading) :]
                break
        share, misfit, part, after = best or (0.0, None, None, update.after)
        violation = None
        if misfit is not None and part is not None:
            violation = describe(
                misfit,
                self.layout,
                obligation="update",
                step=step,
                role="parameter",
                ranks=(),
                elements=part.elements,
                explanation=self._words(misfit, part, update, after),
            )
        self._advance(parts, update)
        return share, violation, after

    def _keys(self, update: HiddenUpdate) -> list[int | None]:
        return [
            count + 1 if has and place.trainable and place.stop > place.start else None
            for place, has, count in zip(self.layout.places, update.has, self._counts, strict=True)
        ]

    def _under(
        self, reading: Reading, parts: Sequence[KernelRange], update: HiddenUpdate
    ) -> tuple[float, Misfit | None, KernelRange | None, State]:
        """Compare under one reading of the options: (share, misfit, its part, state after)."""
        share = 0.0
        after = update.after
        for part in parts:
            scalars = self._scalars(part, update, reading)
            wanted = self._wanted(part, update, scalars)
            observed = _some(after.parameter, part)
            used, misfit = compare(observed, wanted)
            if misfit is not None:
                after = self._best_copies(after, part, misfit, wanted)
                used, misfit = compare(_some(after.parameter, part), wanted)
            if misfit is not None:
                return used, misfit, part, after
            share = max(share, used)
        return share, None, None, after

    def _best_copies(
        self, after: State, part: KernelRange, misfit: Misfit, wanted: Enclosure
    ) -> State:
        """Return the state with wrong parameters taken from ranks with right copies, if any."""
        outside = self._spread(part, misfit.outside)
        chosen = after.parameter
        for parameter in after.per_rank:
            if parameter is after.parameter:
                continue
            right = ~self._spread(part, _outside(_some(parameter, part), wanted))
            for place in self.layout.places:
                here = slice(place.start, place.stop)
                if bool(outside[here].any()) and bool(right[here].all()):
                    if chosen is after.parameter:
                        chosen = chosen.clone()
                    chosen[here] = parameter[here]
                    outside[here] = False
        if chosen is after.parameter:
            return after
        held = [
            chosen if torch.equal(parameter, chosen) else parameter for parameter in after.per_rank
        ]
        return replace(after, parameter=chosen, per_rank=held)

    def _spread(self, part: KernelRange, mask: torch.Tensor) -> torch.Tensor:
        """Expand a mask over the elements of a part to one over the flat vector."""
        if part.elements is None:
            return mask
        whole = torch.zeros(self.layout.size, dtype=torch.bool)
        whole[part.elements] = mask
        return whole

    def _wanted(self, part: KernelRange, update: HiddenUpdate, s: Any) -> Enclosure:
        """Return the range of the parameters after the update."""
        size = self.layout.size if part.elements is None else len(part.elements)
        exact, bound = (torch.empty(size, dtype=torch.float64) for _ in range(2))
        for here, there in pieces(part.elements, self.layout.size):
            p = update.before.parameter[there].double()
            states, gradient = self._states_at(there), self._gradient_at(update, there)
            exact[here], bound[here] = self._rule.range(p, states, gradient, s)
        return Enclosure(exact, bound)

    def _states_at(self, there: Positions) -> dict[str, Interval]:
        return {
            role: Interval(*(part[there] for part in one)) for role, one in self._states.items()
        }

    def _gradient_at(self, update: HiddenUpdate, there: Positions) -> Interval:
        g, error = update.gradient.at(there)
        return Interval(self.recipe.signed(g), error)

    def _advance(self, parts: Sequence[KernelRange], update: HiddenUpdate) -> None:
        """Enclose the moments after the step."""
        for part in parts:
            s = self._scalars(part, update, "double")
            for _, there in pieces(part.elements, self.layout.size):
                states, gradient = self._states_at(there), self._gradient_at(update, there)
                p = update.before.parameter[there].double()
                after = self._rule.hidden_after(p, states, gradient, s)
                for role, (middle, error) in after.items():
                    self._states[role].middle[there] = middle
                    self._states[role].error[there] = error
        keys = self._keys(update)
        self._counts = [
            old if key is None else key for old, key in zip(self._counts, keys, strict=True)
        ]

    def _scalars(self, part: KernelRange, update: HiddenUpdate, reading: Reading) -> Any:
        lr = update.lr[part.group]
        return self.recipe.scalars(self._rule, part.group, lr=lr, step=part.key, reading=reading)

    def _words(
        self, misfit: Misfit, part: KernelRange, update: HiddenUpdate, after: State
    ) -> Explanation:
        """Return what is wrong with parameters outside their range."""
        before = _some(update.before.parameter, part)
        outside = misfit.outside
        if bool(misfit.observed.isnan().any()):
            return unwritten("parameter holds NaN")
        names = self._causes(part, update, after, misfit)
        if torch.equal(misfit.observed[outside], before[outside]):
            return unchanged("parameter", names)
        if names:
            return explanation("parameter", names)
        name = self._rule.name
        return Explanation(
            f"parameter is not what {name} can give from the parameter before and the gradient"
        )

    def _causes(
        self, part: KernelRange, update: HiddenUpdate, after: State, misfit: Misfit
    ) -> tuple[str, ...]:
        """Find known causes that explain every element of the wrong tensors."""
        mask = self._spread(part, misfit.outside)
        places = [p for p in self.layout.places if bool(mask[p.start : p.stop].any())]
        asked = torch.cat([torch.arange(p.start, p.stop) for p in places])
        optimizer = self._rule
        states, gradient = self._states_at(asked), self._gradient_at(update, asked)
        s = self._scalars(part, update, self.readings[0])
        before = update.before.parameter[asked].double()
        later = optimizer.hidden_after(before, states, gradient, s)
        groups = self.recipe.options.groups
        segment = Segment(
            role="parameter",
            observed=after.parameter[asked].double(),
            elements=UpdateElements(before, gradient.middle, _middles(states), _middles(later)),
            options=self.recipe.options,
            group=groups[part.group],
            lr=update.lr[part.group],
            step=part.key,
            reading=self.readings[0],
            rates=self.recipe.rates[part.group],
            others=[(o, update.lr[n]) for n, o in enumerate(groups) if n != part.group],
            since=part.key,
            microbatches=self.recipe.microbatches,
            wider=optimizer.range(before, states, gradient, s).bound,
        )
        found = fitting(optimizer, [segment])
        names = list(dict.fromkeys(one.cause for one in found if one.cause))
        for name, wrong in update.others():
            other = gradient._replace(middle=self.recipe.signed(wrong[asked].double()))
            wanted = optimizer.range(before, states, other, s)
            if name not in names and not bool(_outside(segment.observed, wanted).any()):
                names.append(name)
        return tuple(names)


def _elementwise(recipe: UpdateRecipe) -> tuple[UpdateRule, ...]:
    """Return the rule of an optimizer. Raises Unsupported for one that needs whole matrices."""
    rules = recipe.optimizer.rules
    if any(rule.whole for rule in rules):
        raise Unsupported(
            f"{recipe.optimizer.name} cannot be judged by its parameters alone, and the optimizer "
            "exposes no states"
        )
    return rules


def _middles(states: Mapping[str, Interval]) -> dict[str, torch.Tensor]:
    return {role: one.middle for role, one in states.items()}


def _some(vector: torch.Tensor, part: KernelRange) -> torch.Tensor:
    """Return the elements of a part, float64."""
    return (vector if part.elements is None else vector[part.elements]).double()


def _outside(observed: torch.Tensor, wanted: Enclosure) -> torch.Tensor:
    """Return the mask of the elements outside their enclosure."""
    misfit = compare(observed, wanted)[1]
    return torch.zeros(len(observed), dtype=torch.bool) if misfit is None else misfit.outside
