"""Changes of a step of an optimizer that is its own reference.

One that needs whole parameters may be run on each shard alone, or take a norm of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch

from ... import causes as bugs
from ...floating_point import Enclosure
from ..specification import Change, SegmentStep, UpdateElements
from .part_norms import NormedPart
from .step import enclosures

DIMS = {0: "rows", 1: "columns"}
NORMS = (None, 0, 1)
"""Norms of a step that are tried: all of them, and each of the first two alone."""


def changes(step: SegmentStep) -> Iterator[Change]:
    """Iterate over them."""
    s = step.scalars
    if s.taken and s.new_scalar_states:
        words = f"with new {' and '.join(s.new_scalar_states)}, a state that is one number"
        anew = s._replace(scalar_states=s.new_scalar_states)
        yield step.change(bugs.SCALAR_STATE_LOST, words, anew)
    for ahead, words in ((-1, "less"), (1, "more")) if s.taken else ():
        one = s._replace(taken=s.taken + ahead)
        yield step.change(bugs.STEP_COUNT, f"with a step count of one {words}", one)
    if s.whole:
        yield from _alone(step)
        yield from _with_norms(step)
        yield from _with_means(step)


def _chunks(
    step: SegmentStep, least: int = 2
) -> Iterator[tuple[int, int, str, tuple[torch.Tensor, ...]]]:
    """Iterate over ways to shard: ranks, dim, its name, and the places of elements of each part.

    Of dims of this size at least; ranks for which nothing is left have no part.
    """
    shape = step.elements.shape
    every = torch.arange(math.prod(shape)).view(shape)
    for count in dict.fromkeys(step.segment.ranks):
        for dim, size in enumerate(shape):
            if count > 1 and size >= least:
                yield count, dim, DIMS.get(dim, f"dim {dim}"), every.chunk(count, dim)


def _alone(step: SegmentStep) -> Iterator[Change]:
    """Take the step of each shard alone."""
    shape, cause = step.elements.shape, bugs.STEP_OF_EACH_SHARD
    for count, _, name, places in _chunks(step):
        words = f"run on the {name} of each of {count} ranks alone"
        yield Change(cause, words, partial(_put_together, step, places))
    for count in dict.fromkeys(step.segment.ranks) if len(shape) > 1 else ():
        if count > 1:
            flat = torch.arange(math.prod(shape)).chunk(count)
            words = f"run on the flat shard of each of {count} ranks alone"
            yield Change(cause, words, partial(_put_together, step, flat))


def _put_together(step: SegmentStep, places: tuple[torch.Tensor, ...]) -> Enclosure | None:
    """Return the enclosure of the role, put together from steps of parts.

    places: of the elements of each part, in its shape. None where the parts do not have the state.
    """
    e = step.elements
    exact, bound = torch.empty_like(e.parameter), torch.empty_like(e.parameter)
    for place in places:
        there = place.reshape(-1)
        part: UpdateElements = e._replace(
            parameter=e.parameter[there],
            gradient=e.gradient[there],
            old={role: state[there] for role, state in e.old.items()},
            shape=tuple(place.shape),
            strides=None,
        )
        made = enclosures(part, step.scalars)
        if step.role not in made:
            return None
        exact[there], bound[there] = made[step.role]
    return Enclosure(exact, bound)


def _with_norms(step: SegmentStep) -> Iterator[Change]:
    """Take norms over the whole parameter of each shard."""
    right = enclosures(step.elements, step.scalars)[step.role].exact
    for count, dim, name, places in _chunks(step):
        for number in NORMS:
            exact = torch.empty_like(step.elements.parameter)
            bound, start = torch.empty_like(exact), 0
            for place in places:
                part = NormedPart(dim, start, place.shape[dim], number)
                made = enclosures(step.elements, step.scalars._replace(part=part))
                there = place.reshape(-1)
                exact[there], bound[there] = (one[there] for one in made[step.role])
                if number is None and torch.equal(exact[there], right[there]):
                    return  # no norm is taken, or what this role is does not depend on it
                start += place.shape[dim]
            whole = Enclosure(exact, bound)
            words = f"with a norm of the {name} of each of {count} ranks alone"
            yield Change.known(bugs.NORM_OF_EACH_SHARD, words, whole)


def _with_means(step: SegmentStep) -> Iterator[Change]:
    """Take the mean of the means of unequal shards in place of a mean of squares.

    It is that of a gradient in which part k, of n_k of all n elements along the dim, is multiplied
    by sqrt(n / (W n_k)); of W ranks some may have no part, and add nothing. Rounded to the
    gradient's dtype, that moves a square by 3 u at most. Ranks round their mean, its share, and the
    sum of shares: 3 u more.
    """
    e = step.elements
    shape = step.scalars.state_shape(step.role, len(e.shape))
    for count, dim, name, places in _chunks(step, least=1):
        if shape is None or dim - len(e.shape) not in shape.reduced:
            continue
        gradient = e.gradient.clone()
        for place in places:
            share = e.shape[dim] / (count * place.shape[dim])
            gradient[place.reshape(-1)] *= share**0.5
        if not torch.equal(gradient, e.gradient):
            made = enclosures(e._replace(gradient=gradient), step.scalars)[step.role]
            bound = made.bound + 6 * e.format.u * made.exact.abs()
            whole = Enclosure(made.exact, bound)
            words = f"with the mean of the means of the {name} of {count} ranks"
            yield Change.known(bugs.MEAN_OF_SHARD_MEANS, words, whole)
