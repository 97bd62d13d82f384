"""Recovery of a gradient that the implementation does not expose, from the optimizer's states.

How, and how well, is up to the optimizer: see `UpdateRule.recovered`. With clipping it
is the clipped gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import causes as bugs
from .. import floating_point
from ..case.schema import Case
from ..contract.semantics import Semantics
from ..floating_point import Enclosure, Format, U
from ..protocol.verdicts import Explanation, Violation
from . import bounds, vectors
from .assemble import RoleState
from .clipping import Squares, coefficient, narrow_only, relative_of
from .compare import Misfit, compare_pieces, describe, different_bits, exactly
from .layout import Formats, ParameterLayout
from .manifest_plan import ManifestPlan
from .pieces import Enclosing, Positions, pieces, some, split
from .recipe import UpdateRecipe
from .state import State, float64


class Recovered(NamedTuple):
    """Recovered gradient, of each rank where it has states, and its uncertainty.

    held: fp32, of one rank if several have the same states; error: uncertainty of each element of
    the flat vector, float64; positions: of the elements that it was recovered of.
    """

    held: RoleState
    error: torch.Tensor
    positions: torch.Tensor


def recover(
    recipe: UpdateRecipe,
    before: State,
    after: State,
    layout: ParameterLayout,
    rates: Sequence[float],
) -> Recovered:
    """Recover the gradient that explains a step, of parameters that took it. rates: by group.

    Elements of other parameters hold NaN in `held.whole` and have no error.
    """
    moved = _moved(recipe, before, after, layout)
    whole = vectors.empty(layout.size).fill_(torch.nan)
    error = vectors.zeros(layout.size, dtype=torch.float64)
    keys = [1 if flag else None for flag in moved]
    for rule, part, _ in recipe.ranges(layout, keys):
        roles = rule.states_with(recipe.options)
        # What is recovered does not depend on the number of the step.
        rate = rates[part.group]
        scalars = recipe.scalars(rule, part.group, lr=rate, step=1, reading=rule.readings[0])
        for _, positions in pieces(part.elements, layout.size):
            old, new = _held(before, roles, positions), _held(after, roles, positions)
            g, error[positions] = rule.recovered(old, new, scalars, part.format)
            whole[positions] = recipe.signed(g).float()
    present = frozenset(p.name for p, flag in zip(layout.places, moved, strict=True) if flag)
    absent = frozenset(p.name for p in layout.places if p.trainable) - present
    mask = layout.spread(moved)
    index = vectors.positions(mask)
    indices = [_inside(mask, index, plan) for plan in after.owners] or [index]
    plans = tuple(ManifestPlan(own, present, absent) for own in indices)
    parts = tuple(vectors.taken(whole, own) for own in indices)
    return Recovered(RoleState(whole, parts, plans, ((),) * len(plans)), error, index)


def _inside(mask: torch.Tensor, positions: torch.Tensor, plan: ManifestPlan) -> torch.Tensor:
    """Return which of the positions in the mask a plan has."""
    return positions if plan.index is None else plan.index[mask[plan.index]]


def _held(state: State, roles: Sequence[str], positions: Positions) -> dict[str, torch.Tensor]:
    """Return some elements of the parameter and the states, float64."""
    return {"parameter": float64(state.parameter, positions), **state.values(roles, positions)}


def _moved(
    recipe: UpdateRecipe, before: State, after: State, layout: ParameterLayout
) -> list[bool]:
    """Return, per parameter, True if it took the step.

    By its step count. A rule that has none changes some bit of what has a gradient, or makes its
    state; one of zeros with a gradient of zeros changes nothing.
    """
    found: list[bool] = []
    for place, then, now in zip(layout.places, before.steps, after.steps, strict=True):
        rule = recipe.rule(place)
        if rule.counts_steps:
            counted = then is not None and now is not None and now > then
            found.append(place.trainable and counted)
            continue
        roles = rule.states_with(recipe.options)
        here = slice(place.start, place.stop)
        pairs = [(before.parameter[here], after.parameter[here])]
        pairs += [(before.moment(role)[here], after.moment(role)[here]) for role in roles]
        changed = any(bool(different_bits(old, new).any()) for old, new in pairs)
        zeros = bool(roles) and not any(bool(new.any()) for _, new in pairs[1:])
        made = any(place.name in after.present.get(role, ()) for role in roles)
        found.append(place.trainable and (changed or (zeros and made)))
    return found


def as_shown(gradient: RoleState) -> Enclosing:
    """Enclose an observed gradient with zero width; 0 where there is none."""
    whole = gradient.whole
    return Enclosing(len(whole), lambda there: exactly(some(whole, there).nan_to_num(nan=0.0)))


class Clipping(NamedTuple):
    """Expected value of the recovered gradient, with and without clipping."""

    clipped: Enclosing
    unclipped: Enclosing


def clipping(
    gradient: Enclosing,
    error: torch.Tensor,
    layout: ParameterLayout,
    case: Case,
    semantics: Semantics,
) -> Clipping:
    """Enclose the clipped gradient, from the enclosure of the reduced one.

    The norm is that of the exact gradient. The implementation's may be off by the rounding of the
    gradient and of its own summation: both enter the bound, relative to the element.
    """
    norm, width, squares = _norms(gradient, layout, case)
    widening = width / norm if norm else 0.0
    factor = coefficient(norm, case, semantics)
    relative = relative_of(squares, layout.size, layout.formats.narrow, case) + widening + 4 * U
    narrow = layout.formats.narrow is not None
    only = narrow and narrow_only(layout.formats.at(vectors.positions(layout.trainable)))

    def clipped(positions: Positions | None) -> Enclosure:
        exact, bound = gradient.at(positions)
        made = exact * factor
        width = bound * factor + relative * made.abs() + floating_point.ETA + some(error, positions)
        if narrow:
            largest = exact.abs() + bound
            width = width + relative * factor * bound
            formats = layout.formats.at(positions)
            width = width + _narrow_product(largest, factor * (1 + relative), formats, only)
        return Enclosure(made, width)

    def unclipped(positions: Positions | None) -> Enclosure:
        exact, bound = gradient.at(positions)
        return Enclosure(exact, bound + some(error, positions))

    return Clipping(Enclosing(layout.size, clipped), Enclosing(layout.size, unclipped))


def _norms(
    gradient: Enclosing, layout: ParameterLayout, case: Case
) -> tuple[float, float, Squares]:
    """Return the norms of the exact gradient and of its bounds, and the squares of the norm."""
    order = 2.0 if case.training.norm == "2" else torch.inf
    norms: list[float] = []
    widths: list[float] = []
    squares = Squares(0.0, 0.0)
    for here in split(layout.size):
        exact, bound = gradient.at(here)
        norms.append(float(torch.linalg.vector_norm(exact, ord=order)))
        widths.append(float(torch.linalg.vector_norm(bound, ord=order)))
        squares = squares.and_of(exact, layout.formats.at(here))
    combine = math.hypot if order == 2.0 else max
    return combine(*norms, 0.0), combine(*widths, 0.0), squares


def _narrow_product(
    largest: torch.Tensor, factor: float, formats: Formats, only: bool
) -> torch.Tensor:
    """Bound the rounding of coefficient and product where the gradient is in bf16, else 0.

    fp32 is counted already. largest: the largest magnitude that each element can have; factor: the
    largest coefficient; only: all trainable parameters are in bf16.
    """

    def enclosure(vector: torch.Tensor, format: Format) -> Enclosure:
        if not format.narrow:
            return exactly(torch.zeros_like(vector))
        return bounds.clipped(vector, factor, format, all_narrow=only)

    return formats.enclose(enclosure, largest).bound


def check_clip(
    recovered: Recovered, wanted: Clipping, layout: ParameterLayout, *, step: int, exposed: bool
) -> tuple[float, Violation | None]:
    """Judge clipping by the gradient that entered the optimizer's states.

    exposed: the reduced gradient was shown, so that only clipping can be wrong. Otherwise a misfit
    that plain `not clipped` does not explain is left to the obligation `gradient`.
    """
    part, index = vectors.taken(recovered.held.whole, recovered.positions), recovered.positions

    def inside(wanted: Enclosing) -> tuple[float, Misfit | None]:
        return compare_pieces(
            lambda here, there: (part[here], wanted.at(there)), index, layout.size
        )

    share, misfit = inside(wanted.clipped)
    if misfit is None:
        return share, None
    unclipped = inside(wanted.unclipped)[1] is None
    if not (unclipped or exposed):
        return 0.0, None
    return share, describe(
        misfit,
        layout,
        obligation="clip",
        step=step,
        role="gradient",
        ranks=(),
        elements=index,
        explanation=Explanation(
            "the gradient was not clipped: the optimizer took it in as it was", (bugs.NOT_CLIPPED,)
        )
        if unclipped
        else Explanation("the optimizer took in another gradient than the clipped one"),
    )
