"""Cause and attribution of a wrong update, as a violation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch

from ..optimizers.specification import Change, Reading, Segment, SegmentStep, UpdateRule
from ..protocol.verdicts import Explanation, Violation
from . import vectors
from .attribution.guard import guarded
from .attribution.tensors import tensors
from .compare import describe
from .diagnose.memory_order import orders_of
from .diagnose.named import if_named
from .diagnose.unwritten import unwritten
from .diagnose.update import copies, explanation, fitting, in_words, unchanged
from .layout import ParameterLayout, ParameterPlace
from .pieces import Positions, pieces
from .recipe import Update, UpdateRecipe, WrongRole
from .state import float64


class WrongUpdate:
    """Explanation of one wrong update."""

    def __init__(
        self,
        layout: ParameterLayout,
        recipe: UpdateRecipe,
        readings: Mapping[str, Sequence[Reading]],
        update: Update,
        step: int,
    ) -> None:
        """Take the update. readings: by the name of the rule; step: 0-based, of the case."""
        self.layout = layout
        self.recipe = recipe
        self.readings = readings
        self.update = update
        self.step = step
        self._found: dict[tuple[str, tuple[str, ...]], tuple[Change, ...]] = {}

    def violations(self, failed: Sequence[WrongRole]) -> list[Violation]:
        """Return the violation of each role that is wrong.

        Each with the attribution of all of its role: parameters may be judged one by one.
        """
        found = [self._violation(one) for one in failed]
        for role in dict.fromkeys(one.role for one in failed):
            alike = [one for one in failed if one.role == role]
            made_of = guarded(lambda alike=alike: self._attribution(alike))  # type: ignore[misc]
            for number, one in enumerate(failed):
                if one.role == role:
                    found[number] = msgspec.structs.replace(found[number], attribution=made_of)
        return found

    def _violation(self, wrong: WrongRole) -> Violation:
        return describe(
            wrong.misfit,
            self.layout,
            obligation="update",
            step=self.step,
            role=wrong.role,
            ranks=(),
            elements=wrong.part.range.elements,
            explanation=self._words(wrong),
        )

    def _attribution(self, failed: Sequence[WrongRole]) -> str:
        """Say which changes of the optimizer's step give the wrong tensors of one role."""
        role = failed[0].role
        found: dict[str, list[ParameterPlace]] = {}
        every = 0
        for wrong in failed:
            places = self._wrong_places(wrong)
            every += len(places)
            whole = self._edited(wrong, places)
            if whole:
                found.setdefault(whole, []).extend(places)
            for place in () if whole or len(places) == 1 else places:
                words = self._edited(wrong, [place])
                if words:
                    found.setdefault(words, []).append(place)
        mastered = self.update.after.mastered
        parts = []
        for words, of in found.items():
            name = role
            if role == "parameter" and mastered is not None:
                masters = [bool(mastered[one.start : one.stop].any()) for one in of]
                name = "master parameter" if all(masters) else role
            parts.append(f"{name} of {tensors([one.name for one in of], self.layout)}: {words}")
        explained = sum(map(len, found.values()))
        if parts and explained < every:
            parts.append(f"{every - explained} more tensors are not explained")
        return "; ".join(parts)

    def _edited(self, wrong: WrongRole, places: Sequence[ParameterPlace]) -> str:
        segments = list(self._segments(wrong, places))
        rule = wrong.part.rule

        def before(segment: Segment) -> torch.Tensor:
            e = segment.elements
            return e.parameter if wrong.role == "parameter" else e.old[wrong.role]

        taken = [SegmentStep(rule, one).take() for one in segments]
        right = [one for one in taken if one is not None]
        text = copies(segments, [before(one) for one in segments], right)
        if text:
            return text
        return in_words(self._fitting(wrong, places))

    def _fitting(self, wrong: WrongRole, places: Sequence[ParameterPlace]) -> tuple[Change, ...]:
        """Return the changes that give these tensors, under the most exact reading that has any."""
        key = wrong.role, tuple(place.name for place in places)
        rule = wrong.part.rule
        for reading in self._readings(rule) if key not in self._found else ():
            segments = self._segments(wrong, places)
            found = fitting(rule, (one._replace(reading=reading) for one in segments))
            if found:
                self._found[key] = found
                break
        return self._found.setdefault(key, ())

    def _readings(self, rule: UpdateRule) -> Sequence[Reading]:
        """Return the readings under which causes are looked for, the most exact one first."""
        every = rule.whole or rule.itself
        return self.readings[rule.name] if every else self.readings[rule.name][:1]

    def _wrong_places(self, wrong: WrongRole) -> list[ParameterPlace]:
        """Return the tensors with an element outside."""
        mask = torch.zeros(self.layout.size, dtype=torch.bool)
        for here, there in pieces(wrong.part.range.elements, self.layout.size):
            mask[there] = wrong.misfit.outside[here]
        return [p for p in self.layout.places if bool(mask[p.start : p.stop].any())]

    def _words(self, wrong: WrongRole) -> Explanation:
        observed = wrong.misfit.observed
        if bool(observed.isnan().any()):
            found = unwritten(f"{wrong.role} holds NaN")
            return Explanation(found.text, if_named(*found.causes))
        state = self.update.before
        before = state.parameter if wrong.role == "parameter" else state.moment(wrong.role)
        if wrong.part.range.elements is not None:
            before = before[wrong.part.range.elements]
        outside = wrong.misfit.outside
        rule = wrong.part.rule
        fits = self._fitting(wrong, self._wrong_places(wrong))
        names = tuple(dict.fromkeys(one.cause for one in fits if one.cause))
        if torch.equal(observed[outside], before[outside].to(torch.float64)):
            return unchanged(wrong.role, names)
        if names:
            return explanation(wrong.role, names)
        return Explanation(
            f"{wrong.role} is not what {rule.name} gives from the state before and the gradient"
        )

    def _segments(self, wrong: WrongRole, places: Sequence[ParameterPlace]) -> Iterator[Segment]:
        """Return these tensors of the group, piece by piece."""
        if wrong.part.place is not None:
            yield self._segment(wrong, wrong.part.range.elements, self.update.previous())
            return
        asked = torch.zeros(self.layout.size, dtype=torch.bool)
        for _, there in pieces(wrong.part.range.elements, self.layout.size):
            asked[there] = True
        asked &= self.layout.spread([place in places for place in self.layout.places])
        elements = vectors.positions(asked)
        previous = self.update.previous()
        for _, there in pieces(elements, self.layout.size):
            yield self._segment(wrong, there, previous)

    def _segment(
        self, wrong: WrongRole, elements: Positions | None, previous: torch.Tensor | None
    ) -> Segment:
        recipe, update = self.recipe, self.update
        after, (rule, part, place) = update.after, wrong.part

        def gradient(vector: torch.Tensor) -> torch.Tensor:
            return recipe.signed(float64(vector, elements))

        observed = after.parameter if wrong.role == "parameter" else after.moment(wrong.role)
        return Segment(
            role=wrong.role,
            observed=float64(observed, elements),
            elements=recipe.elements(update, rule, elements, part.format, place),
            unclipped=None if update.unclipped is None else gradient(update.unclipped),
            previous=None if previous is None else gradient(previous),
            in_memory=[gradient(update.gradient[order]) for order in orders_of(self.layout)],
            gradients=lambda: [(name, gradient(other)) for name, other in update.others()],
            parameter_after=float64(after.parameter, elements),
            since=self.step + 1,
            microbatches=recipe.microbatches,
            options=recipe.options,
            group=recipe.options.groups[part.group],
            lr=update.lr[part.group],
            step=part.key,
            reading=self.readings[rule.name][0],
            rates=recipe.rates[part.group],
            ranks=recipe.ranks,
            others=[
                (group, update.lr[number])
                for number, group in enumerate(recipe.options.groups)
                if number != part.group
            ],
        )
