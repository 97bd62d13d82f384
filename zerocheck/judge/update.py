"""Obligation: given state and observed gradient, the next state lies in its enclosure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import torch

from .. import causes as bugs
from ..floating_point import Enclosure
from ..optimizers.specification import Reading
from ..protocol.verdicts import Explanation, Violation
from .attribution.tensors import tensors
from .compare import Misfit, compare, compare_pieces, different_bits, first_outside
from .diagnose.named import named
from .layout import ParameterLayout, ParameterPlace
from .pieces import Positions, in_pieces, of_each, pieces
from .recipe import RuleRange, Update, UpdateRecipe, WrongRole
from .state import float64
from .wrong_update import WrongUpdate


class UpdateJudge:
    """Judge of the updates that one optimizer makes.

    Which of the readings of a rule holds is one answer for the whole run, not per element: a
    reading that failed once is out.
    """

    def __init__(self, layout: ParameterLayout, recipe: UpdateRecipe) -> None:
        self.layout = layout
        self.recipe = recipe
        self.readings: dict[str, list[Reading]] = {
            rule.name: list(rule.readings) for rule in recipe.optimizer.rules
        }
        """Readings that are left, by the name of the rule."""

    @property
    def estimated(self) -> bool:
        """True if a bound of the updates so far was an estimate."""
        return any(left[0] == "estimated" for left in self.readings.values())

    def check(self, update: Update, *, step: int) -> tuple[float, Violation | None]:
        """Check an update: (share of the bound, violation or None)."""
        violation = self._of_others(update, step)
        violation = violation or self._steps(update, step) or self._untouched(update, step)
        if violation is not None:
            return 0.0, violation
        share = 0.0
        failed: list[WrongRole] = []
        parts: dict[str, list[RuleRange]] = {}
        for part in self.recipe.ranges(self.layout, self._keys(update)):
            parts.setdefault(part.rule.name, []).append(part)
        for name, of_rule in parts.items():
            used, wrong = self._of_rule(name, of_rule, update)
            share = max(share, used)
            failed += wrong
        if not failed:
            return share, None
        explained = WrongUpdate(self.layout, self.recipe, self.readings, update, step)
        violation, *others = explained.violations(failed)
        if others:
            violation = msgspec.structs.replace(violation, parts=(violation, *others))
        return float(failed[0].misfit.ratio.max()), violation

    def _of_rule(
        self, name: str, parts: Sequence[RuleRange], update: Update
    ) -> tuple[float, list[WrongRole]]:
        """Compare what one rule updates: (share of the bound, misfit of each part)."""
        failed: list[WrongRole] = []
        # Another reading is only asked for when one fails.
        for number, reading in enumerate(self.readings[name]):
            share, wrong = self._under(reading, update, parts)
            if not wrong:
                self.readings[name] = self.readings[name][number:]
                return share, []
            # What is outside of an estimate too: of the rest another kernel rounds otherwise.
            failed = wrong if reading == "estimated" else failed or wrong
        return 0.0, failed

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
        for position, place in enumerate(self.layout.places):
            if not place.trainable or place.start == place.stop:
                continue
            rule = self.recipe.rule(place)
            if not rule.counts_steps:
                continue
            if rule.counts_in_group and not update.has[position]:
                continue  # its group counts without it, which nothing shows
            before, after = update.before.steps[position], update.after.steps[position]
            wanted = None if before is None else before + update.has[position]
            if after is not None and after == before and self._same(update, place):
                return self._never(update, step)
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

    def _of_others(self, update: Update, step: int) -> Violation | None:
        """Check that no parameter has a state of the optimizer that updates others."""
        optimizer = self.recipe.optimizer
        for other in optimizer.rules if len(optimizer.rules) > 1 else ():
            wrong = [
                place
                for place in self.layout.places
                if self.recipe.rule(place) is not other
                and any(place.name in update.after.present.get(r, ()) for r in other.states)
            ]
            if wrong:
                words = tensors([place.name for place in wrong], self.layout)
                right = self.recipe.rule(wrong[0]).name
                text = f"{words} {'have' if len(wrong) > 1 else 'has'} states of {other.name}"
                return Violation(
                    obligation="update",
                    step=step,
                    role=other.states[0],
                    tensors=tuple(place.name for place in wrong),
                    ranks=(),
                    explanation=f"{text}: {other.name} updates what the case gives to {right}",
                    causes=(bugs.UPDATED_BY_ANOTHER_OPTIMIZER,) if named() else (),
                    attribution=f"{text}, which updates them, or updates them too",
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

    def _never(self, update: Update, step: int) -> Violation:
        """Return the violation of parameters that keep every bit, and their step count."""
        learning = [
            (position, place)
            for position, place in enumerate(self.layout.places)
            if place.trainable and place.start < place.stop and update.has[position]
        ]
        same = [
            place.name
            for position, place in learning
            if update.after.steps[position] == update.before.steps[position]
            and self._same(update, place)
        ]
        words = tensors(same, self.layout)
        explanation = Explanation(no_optimizer(same, self.layout), (bugs.NEVER_UPDATED,))
        attribution = f"parameter, states and step count of {words} have the values from before "
        attribution += "the step: it is not updated"
        if len(same) == len(learning):
            sentences = {
                bugs.STEP_SKIPPED: "the step was skipped though the gradient is finite, and is not "
                "reported as skipped",
                bugs.NEVER_UPDATED: "no optimizer has the parameters",
            }
            explanation = Explanation.of(sentences, sentences, "no parameter was updated", ": ")
        return Violation(
            obligation="update",
            step=step,
            role="parameter",
            tensors=tuple(same),
            ranks=(),
            explanation=explanation.text,
            causes=explanation.causes,
            sentences=explanation.sentences,
            attribution=attribution,
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
                    tensors=self.layout.names_of(changed),
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
        self, reading: Reading, update: Update, parts: Sequence[RuleRange]
    ) -> tuple[float, list[WrongRole]]:
        """Compare under one reading of the options: (share of the bound, misfit of each part)."""
        share = 0.0
        found: list[WrongRole] = []
        for part in parts:
            elements = part.range.elements
            if part.place is None and in_pieces(elements, self.layout.size):
                used, role, misfit = self._by_pieces(reading, update, part)
            else:
                used, role, misfit = first_outside(
                    self._enclosures(reading, update, part, elements)
                )
            if misfit is not None:
                found.append(WrongRole(role, misfit, part))
            share = max(share, used)
        return share, found

    def _by_pieces(
        self, reading: Reading, update: Update, part: RuleRange
    ) -> tuple[float, str, Misfit | None]:
        """Compare like `first_outside`, for elements that have several pieces."""

        def compared(_: slice, there: Positions) -> list[tuple[float, str]]:
            found = []
            for role, observed, enclosure in self._enclosures(reading, update, part, there):
                used, misfit = compare(observed, enclosure)
                found.append((used, role if misfit is not None else ""))
            return found

        every = [*of_each(compared, pieces(part.range.elements, self.layout.size))]
        share = max(used for found in every for used, _ in found)
        outside = {role for found in every for _, role in found if role}
        if not outside:
            return share, "", None
        # What a wrong one leads to is judged by itself.
        order = (*part.rule.states, "parameter")
        role = next(role for role in order if role in outside)

        def at(_: slice, there: Positions) -> tuple[torch.Tensor, Enclosure]:
            made = self._enclosures(reading, update, part, there)
            return next(one[1:] for one in made if one[0] == role)

        share, misfit = compare_pieces(at, part.range.elements, self.layout.size)
        return share, role, misfit

    def _enclosures(
        self, reading: Reading, update: Update, part: RuleRange, elements: Positions | None
    ) -> Iterator[tuple[str, torch.Tensor, Enclosure]]:
        """Iterate over (role, observed, enclosure) of these elements, in the order of the step."""
        rule, range = part.rule, part.range
        rate = update.lr[range.group]
        scalars = self.recipe.scalars(rule, range.group, lr=rate, step=range.key, reading=reading)
        made = self.recipe.elements(update, rule, elements, range.format, part.place)
        for role, enclosure in rule.enclosures(made, scalars):
            observed = made.new.get(role)
            if observed is None:
                observed = float64(update.after.parameter, elements)
            yield role, observed, enclosure


def no_optimizer(names: Sequence[str], layout: ParameterLayout) -> str:
    """Return that no optimizer has these parameters, so that they were not updated."""
    verb, them = ("were", "them") if len(names) > 1 else ("was", "it")
    return f"{tensors(names, layout)} {verb} not updated: no optimizer has {them}"
