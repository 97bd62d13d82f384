"""Steps of an optimizer that needs whole parameters, run on each shard alone, or in part."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ... import causes as bugs
from ...floating_point import Enclosure
from ..specification import Segment, UpdateElements
from . import step
from .part_norms import NormedPart

DIMS = {0: "rows", 1: "columns"}
NORMS = (None, 0, 1)
"""Norms of a step that are tried: all of them, and each of the first two alone."""


def variants(segment: Segment) -> Iterator[tuple[str, Enclosure]]:
    """Enclose the segment's role after a step with shards taken for wholes: (cause, enclosure)."""
    for _, made in _alone(segment):
        yield bugs.STEP_OF_EACH_SHARD, made
    for _, made in _with_norms(segment):
        yield bugs.NORM_OF_EACH_SHARD, made
    for _, made in _with_means(segment):
        yield bugs.MEAN_OF_SHARD_MEANS, made


def reruns(segment: Segment) -> Iterator[tuple[str, Enclosure]]:
    """Enclose the same: (in words, enclosure)."""
    yield from _alone(segment)
    yield from _with_norms(segment)
    yield from _with_means(segment)


def _chunks(
    segment: Segment, least: int = 2
) -> Iterator[tuple[int, int, str, tuple[torch.Tensor, ...]]]:
    """Iterate over ways to shard: ranks, dim, its name, and the places of elements of each part.

    Of dims of this size at least; ranks for which nothing is left have no part.
    """
    shape = segment.elements.shape
    every = torch.arange(math.prod(shape)).view(shape)
    for count in dict.fromkeys(segment.ranks):
        for dim, size in enumerate(shape):
            if count > 1 and size >= least:
                yield count, dim, DIMS.get(dim, f"dim {dim}"), every.chunk(count, dim)


def _alone(segment: Segment) -> Iterator[tuple[str, Enclosure]]:
    """Enclose the role after a step of each shard alone."""
    shape = segment.elements.shape
    for count, _, words, places in _chunks(segment):
        made = _put_together(segment, places)
        if made is not None:
            yield f"run on the {words} of each of {count} ranks alone", made
    for count in dict.fromkeys(segment.ranks) if len(shape) > 1 else ():
        flat = torch.arange(math.prod(shape)).chunk(count)
        made = _put_together(segment, flat) if count > 1 else None
        if made is not None:
            yield f"run on the flat shard of each of {count} ranks alone", made


def _put_together(segment: Segment, places: tuple[torch.Tensor, ...]) -> Enclosure | None:
    """Return the enclosure of the role, put together from steps of parts.

    places: of the elements of each part, in its shape. None where the parts do not have the state.
    """
    e = segment.elements
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
        made = step.enclosures(part, segment.scalars)
        if segment.role not in made:
            return None
        exact[there], bound[there] = made[segment.role]
    return Enclosure(exact, bound)


def _with_norms(segment: Segment) -> Iterator[tuple[str, Enclosure]]:
    """Enclose the role after a step with norms over the whole parameter taken of each shard."""
    right = step.enclosures(segment.elements, segment.scalars)[segment.role].exact
    for count, dim, words, places in _chunks(segment):
        for number in NORMS:
            exact = torch.empty_like(segment.elements.parameter)
            bound, start = torch.empty_like(exact), 0
            for place in places:
                part = NormedPart(dim, start, place.shape[dim], number)
                made = step.enclosures(segment.elements, segment.scalars._replace(part=part))
                there = place.reshape(-1)
                exact[there], bound[there] = (one[there] for one in made[segment.role])
                if number is None and torch.equal(exact[there], right[there]):
                    return  # no norm is taken, or what this role is does not depend on it
                start += place.shape[dim]
            yield (
                f"with a norm of the {words} of each of {count} ranks alone",
                Enclosure(exact, bound),
            )


def _with_means(segment: Segment) -> Iterator[tuple[str, Enclosure]]:
    """Enclose a mean of squares that is the mean of the means of unequal shards.

    It is that of a gradient in which part k, of n_k of all n elements along the dim, is multiplied
    by sqrt(n / (W n_k)); of W ranks some may have no part, and add nothing. Rounded to the
    gradient's dtype, that moves a square by 3 u at most. Ranks round their mean, its share, and the
    sum of shares: 3 u more.
    """
    e = segment.elements
    shape = segment.scalars.state_shape(segment.role, len(e.shape))
    for count, dim, words, places in _chunks(segment, least=1):
        if shape is None or dim - len(e.shape) not in shape.reduced:
            continue
        gradient = e.gradient.clone()
        for place in places:
            share = e.shape[dim] / (count * place.shape[dim])
            gradient[place.reshape(-1)] *= share**0.5
        if not torch.equal(gradient, e.gradient):
            made = step.enclosures(e, segment.scalars, gradient=gradient)[segment.role]
            bound = made.bound + 6 * e.format.u * made.exact.abs()
            yield (
                f"with the mean of the means of the {words} of {count} ranks",
                Enclosure(made.exact, bound),
            )
