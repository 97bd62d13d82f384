"""Obligation: given state and observed gradient, the next state lies in its enclosure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from .. import causes as bugs
from ..case.schema import Case, Optimizer
from ..case.segments import end_of
from ..contract.groups import learning_rates
from ..floating_point import Enclosure, Format
from ..optimizers import optimizer_of
from ..optimizers.specification import OptimizerSpecification, Reading, Segment, UpdateElements
from ..protocol.verdicts import Violation
from . import vectors
from .compare import (
    Misfit,
    compare,
    compare_pieces,
    describe,
    different_bits,
    first_outside,
)
from .attribution.tensors import tensors
from .attribution.update import copies, edits
from .diagnose.memory_order import orders_of
from .diagnose.named import named
from .diagnose.update import causes, sentence
from .layout import Elements, KernelRange, ParameterLayout, ParameterPlace
from .pieces import Positions, in_pieces, pieces
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
    """Optimizer with its options; rates: of all steps, by group, for the diagnosis."""

    optimizer: OptimizerSpecification
    options: Optimizer
    rates: Sequence[Sequence[float]]
    microbatches: int = 1

    @classmethod
    def of(cls, case: Case) -> UpdateRecipe:
        """Return the options of a case."""
        options = case.optimizer
        steps = [learning_rates(case, index) for index in range(end_of(case))]
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


class _Wrong(NamedTuple):
    role: str
    misfit: Misfit
    elements: Elements
    group: int
    steps: int
    format: Format


class UpdateJudge:
    """Judge of the updates that one optimizer makes.

    Which of the two readings of the hyperparameters holds is one answer for the whole run, not
    per element: a reading that failed once is out.
    """

    def __init__(self, layout: ParameterLayout, recipe: UpdateRecipe) -> None:
        self.layout = layout
        self.recipe = recipe
        self.readings: list[Reading] = list(recipe.optimizer.readings)

    def check(self, update: Update, *, step: int) -> tuple[float, Violation | None]:
        """Check an update: (share of the bound, violation or None)."""
        violation = self._steps(update, step) or self._untouched(update, step)
        if violation is not None:
            return 0.0, violation
        keys = self._keys(update)
        failed: list[_Wrong] = []
        best = 0.0
        kept: list[Reading] = []
        for reading in self.readings:
            share, wrong = self._under(reading, update, keys)
            if not wrong:
                best = share if not kept else min(best, share)
                kept.append(reading)
                # The other reading is only asked for when this one fails.
                break
            failed = failed or wrong
        if kept:
            self.readings = self.readings[self.readings.index(kept[0]) :]
            return best, None
        violation, *others = (self._violation(one, update, step) for one in failed)
        if others:
            violation = msgspec.structs.replace(violation, parts=(violation, *others))
        return float(failed[0].misfit.ratio.max()), violation

    def _violation(self, wrong: _Wrong, update: Update, step: int) -> Violation:
        text, names = self._words(wrong, update, step)
        violation = describe(
            wrong.misfit,
            self.layout,
            obligation="update",
            step=step,
            role=wrong.role,
            ranks=(),
            elements=wrong.elements,
            explanation=text,
            causes=names,
        )
        made_of = self._attribution(wrong, update, step)
        return msgspec.structs.replace(violation, attribution=made_of)

    def _attribution(self, wrong: _Wrong, update: Update, step: int) -> str:
        """Say which edit of the optimizer's equation gives the wrong tensors of a role."""
        places = self._wrong_places(wrong)
        whole = self._edited(wrong, update, step, places)
        found = {whole: places} if whole else {}
        if not whole:
            for place in places:
                words = self._edited(wrong, update, step, [place])
                if words:
                    found.setdefault(words, []).append(place)
        mastered = update.after.mastered
        parts = []
        for words, of in found.items():
            role = wrong.role
            if role == "parameter" and mastered is not None:
                masters = [bool(mastered[one.start : one.stop].any()) for one in of]
                role = "master parameter" if all(masters) else role
            parts.append(f"{role} of {tensors([one.name for one in of], self.layout)}: {words}")
        explained = sum(map(len, found.values()))
        if parts and explained < len(places):
            parts.append(f"{len(places) - explained} more tensors are not explained")
        return "; ".join(parts)

    def _edited(
        self, wrong: _Wrong, update: Update, step: int, places: Sequence[ParameterPlace]
    ) -> str:
        segments = list(self._segments(wrong, update, step, places))
        optimizer = self.recipe.optimizer

        def before(segment: Segment) -> torch.Tensor:
            e = segment.elements
            return e.parameter if wrong.role == "parameter" else e.old[wrong.role]

        right = [dict(optimizer.enclosures(s.elements, s.scalars))[wrong.role] for s in segments]
        text = copies(segments, [before(one) for one in segments], right)
        return text or ", or ".join(edit.words for edit in edits(optimizer, segments))

    def _wrong_places(self, wrong: _Wrong) -> list[ParameterPlace]:
        """Return the tensors with an element outside."""
        mask = torch.zeros(self.layout.size, dtype=torch.bool)
        for here, there in pieces(wrong.elements, self.layout.size):
            mask[there] = wrong.misfit.outside[here]
        return [p for p in self.layout.places if bool(mask[p.start : p.stop].any())]

    def _keys(self, update: Update) -> list[int | None]:
        keys: list[int | None] = []
        for place, has, count in zip(
            self.layout.places, update.has, update.after.steps, strict=True
        ):
            updated = has and place.trainable and place.stop > place.start
            keys.append(int(count or 0) if updated else None)
        return keys

    def _steps(self, update: Update, step: int) -> Violation | None:
        """Check that the step count goes up by exactly one where there was a gradient."""
        if not self.recipe.optimizer.counts_steps:
            return None
        for position, place in enumerate(self.layout.places):
            if not place.trainable or place.start == place.stop:
                continue
            before, after = update.before.steps[position], update.after.steps[position]
            wanted = None if before is None else before + update.has[position]
            if after is not None and after == before and self._same(update, place):
                return self._never(place, step)
            if after is None or after != wanted:
                found = "different on different ranks" if after is None else f"{after:g}"
                return Violation(
                    obligation="update",
                    step=step,
                    role="step",
                    tensors=(place.name,),
                    ranks=(),
                    explanation=f"the optimizer's step count is {found}, it must be {wanted:g}"
                    if wanted is not None
                    else "the optimizer's step count differs between ranks",
                    observed=after,
                    expected=wanted,
                    causes=(bugs.STEP_COUNT,),
                    attribution=self._of_count(update, place, after, wanted),
                )
        return None

    def _of_count(
        self, update: Update, place: ParameterPlace, after: float | None, wanted: float | None
    ) -> str:
        """Say which number a wrong step count is."""
        if after is None:
            return f"the step count of {place.name} differs between ranks"
        text = f"the step count of {place.name} is {after:g}"
        if wanted is None:
            return text
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if after == float(torch.tensor(wanted).to(dtype)):
                return f"{text}: it is {wanted:g} rounded to {name}"
        ahead = after - wanted
        way = f"{abs(ahead):g} {'too many' if ahead > 0 else 'too few'}"
        return f"{text}, and not {wanted:g}: {way}"

    def _same(self, update: Update, place: ParameterPlace) -> bool:
        """Return True if nothing of this parameter changed, though it has a gradient."""
        part = slice(place.start, place.stop)
        pairs = [(update.before.parameter, update.after.parameter)]
        pairs += [(update.before.moment(r), update.after.moment(r)) for r in update.after.moments]
        has = update.has[self.layout.places.index(place)]
        return has and all(torch.equal(old[part], new[part]) for old, new in pairs)

    def _never(self, place: ParameterPlace, step: int) -> Violation:
        return Violation(
            obligation="update",
            step=step,
            role="parameter",
            tensors=(place.name,),
            ranks=(),
            explanation=f"{place.name} was not updated: no optimizer has it",
            causes=(bugs.NEVER_UPDATED,),
            attribution=f"parameter, states and step count of {place.name} have the values from "
            "before the step: it is not updated",
        )

    def _untouched(self, update: Update, step: int) -> Violation | None:
        """Check that parameters that are frozen or have no gradient keep every bit, moments too."""
        still = [
            not (place.trainable and has)
            for place, has in zip(self.layout.places, update.has, strict=True)
        ]
        if not any(still):
            return None
        mask = self.layout.spread(still)
        roles = [("parameter", update.before.parameter, update.after.parameter)]
        roles += [
            (role, update.before.moment(role), update.after.moment(role))
            for role in self.recipe.optimizer.states
            if role in update.after.moments
        ]
        for role, before, after in roles:
            changed = mask & different_bits(before, after)
            if role != "parameter":
                changed &= self.layout.trainable
            if bool(changed.any()):
                place, index = self.layout.at(int(changed.nonzero()[0]))
                kind = "has no gradient" if place.trainable else "is frozen, or not optimized"
                changes = "it" if role == "parameter" else f"its {role}"
                position = int(changed.nonzero()[0])
                return Violation(
                    obligation="update",
                    step=step,
                    role=role,
                    tensors=self.layout.names_of(changed, changed.to(torch.float64)),
                    ranks=(),
                    element=index,
                    observed=float(after[position]),
                    expected=float(before[position]),
                    bound=0.0,
                    wrong=int(torch.count_nonzero(changed)),
                    total=int(torch.count_nonzero(mask)),
                    explanation=f"{place.name} {kind}, so it must stay as it was, but {changes} "
                    "changed",
                    causes=(bugs.UNTOUCHED_PARAMETER_CHANGED,),
                    attribution=f"{role} of {place.name} changed, though it {kind}",
                )
        return None

    def _under(
        self, reading: Reading, update: Update, keys: Sequence[int | None]
    ) -> tuple[float, list[_Wrong]]:
        """Compare under one reading of the options: (share of the bound, misfit of each part)."""
        share = 0.0
        found: list[_Wrong] = []
        for part in self.layout.segments(keys):
            if in_pieces(part.elements, self.layout.size):
                used, role, misfit = self._by_pieces(reading, update, part)
            else:
                used, role, misfit = first_outside(
                    self._enclosures(reading, update, part, part.elements)
                )
            if misfit is not None:
                found.append(_Wrong(role, misfit, part.elements, part.group, part.key, part.format))
            share = max(share, used)
        return share, found

    def _by_pieces(
        self, reading: Reading, update: Update, part: KernelRange
    ) -> tuple[float, str, Misfit | None]:
        """Compare like `first_outside`, for elements that have several pieces."""
        share = 0.0
        outside: list[str] = []
        for _, there in pieces(part.elements, self.layout.size):
            for role, observed, enclosure in self._enclosures(reading, update, part, there):
                used, misfit = compare(observed, enclosure)
                share = max(share, used)
                if misfit is not None:
                    outside.append(role)
                    break
        if not outside:
            return share, "", None
        # What a wrong one leads to is judged by itself.
        order = (*self.recipe.optimizer.states, "parameter")
        role = next(role for role in order if role in outside)

        def at(_: slice, there: Positions) -> tuple[torch.Tensor, Enclosure]:
            made = self._enclosures(reading, update, part, there)
            return next(one[1:] for one in made if one[0] == role)

        share, misfit = compare_pieces(at, part.elements, self.layout.size)
        return share, role, misfit

    def _enclosures(
        self, reading: Reading, update: Update, part: KernelRange, elements: Positions | None
    ) -> list[tuple[str, torch.Tensor, Enclosure]]:
        """Return (role, observed, enclosure) of these elements, in the order of the step."""
        scalars = self._scalars(update, part.group, part.key, reading)
        made = self._elements(update, elements, part.format)
        return [
            (
                role,
                made.new[role] if role in made.new else float64(update.after.parameter, elements),
                enclosure,
            )
            for role, enclosure in self.recipe.optimizer.enclosures(made, scalars)
        ]

    def _elements(
        self, update: Update, elements: Positions | None, format: Format
    ) -> UpdateElements:
        before, after, error = update.before, update.after, update.error
        roles = self.recipe.optimizer.states_with(self.recipe.options)
        return UpdateElements(
            float64(before.parameter, elements),
            self.recipe.signed(float64(update.gradient, elements)),
            before.values(roles, elements),
            after.values(roles, elements),
            float64(error, elements) if isinstance(error, torch.Tensor) else error,
            format,
        )

    def _words(self, wrong: _Wrong, update: Update, step: int) -> tuple[str, tuple[str, ...]]:
        observed = wrong.misfit.observed
        if bool(observed.isnan().any()):
            return (
                f"{wrong.role} holds NaN: memory that was never written was read "
                "(zerocheck fills such memory with NaN)",
                (bugs.UNINITIALISED_MEMORY,) if named() else (),
            )
        before = (
            update.before.parameter
            if wrong.role == "parameter"
            else update.before.moment(wrong.role)
        )
        if wrong.elements is not None:
            before = before[wrong.elements]
        outside = wrong.misfit.outside
        optimizer = self.recipe.optimizer
        names: tuple[str, ...] = ()
        if named():
            segments = self._segments(wrong, update, step, self._wrong_places(wrong))
            names = causes(optimizer, segments)
        if torch.equal(observed[outside], before[outside].to(torch.float64)):
            # Moments that are 0 still, or a rate of 0, leave it as it was too.
            known = (bugs.NEVER_UPDATED, *names) if named() else ()
            return f"{wrong.role} was not updated", known
        if names:
            return sentence(optimizer, wrong.role, names), names
        name = optimizer.name
        return f"{wrong.role} is not what {name} gives from the state before and the gradient", ()

    def _segments(
        self, wrong: _Wrong, update: Update, step: int, places: Sequence[ParameterPlace]
    ) -> Iterator[Segment]:
        """Return these tensors of the group, piece by piece."""
        asked = torch.zeros(self.layout.size, dtype=torch.bool)
        for _, there in pieces(wrong.elements, self.layout.size):
            asked[there] = True
        asked &= self.layout.spread([place in places for place in self.layout.places])
        elements = vectors.positions(asked)
        previous = update.previous()
        for _, there in pieces(elements, self.layout.size):
            yield self._segment(wrong, update, step, there, previous)

    def _segment(
        self,
        wrong: _Wrong,
        update: Update,
        step: int,
        elements: Positions,
        previous: torch.Tensor | None,
    ) -> Segment:
        recipe, after = self.recipe, update.after

        def gradient(vector: torch.Tensor) -> torch.Tensor:
            return recipe.signed(float64(vector, elements))

        observed = after.parameter if wrong.role == "parameter" else after.moment(wrong.role)
        return Segment(
            role=wrong.role,
            observed=float64(observed, elements),
            elements=self._elements(update, elements, wrong.format),
            unclipped=None if update.unclipped is None else gradient(update.unclipped),
            previous=None if previous is None else gradient(previous),
            in_memory=[gradient(update.gradient[order]) for order in orders_of(self.layout)],
            gradients=lambda: [(name, gradient(other)) for name, other in update.others()],
            parameter_after=float64(after.parameter, elements),
            since=step + 1,
            microbatches=recipe.microbatches,
            scalars=self._scalars(update, wrong.group, wrong.steps, self.readings[0]),
            step=wrong.steps,
            rates=recipe.rates[wrong.group],
            others=[
                (group, update.lr[number])
                for number, group in enumerate(recipe.options.groups)
                if number != wrong.group
            ],
        )

    def _scalars(self, update: Update, group: int, count: int, reading: Reading) -> Any:
        return self.recipe.scalars(group, lr=update.lr[group], step=count, reading=reading)
