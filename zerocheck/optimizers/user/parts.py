"""Steps of a class that needs whole parameters, run on each shard of them alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ... import causes as bugs
from ...floating_point import Enclosure
from ..specification import Segment, UpdateElements
from ..unsharded import step

DIMS = {0: "rows", 1: "columns"}


def variants(segment: Segment) -> Iterator[tuple[str, Enclosure]]:
    """Enclose the segment's role after a step of each shard alone: (cause, enclosure)."""
    for _, made in reruns(segment):
        yield bugs.STEP_OF_EACH_SHARD, made


def reruns(segment: Segment) -> Iterator[tuple[str, Enclosure]]:
    """Enclose the segment's role after a step of each shard alone: (in words, enclosure)."""
    shape = segment.elements.shape
    for count in dict.fromkeys(segment.ranks):
        if count < 2:
            continue
        for dim, size in enumerate(shape):
            if size > 1:
                places = torch.arange(math.prod(shape)).view(shape).chunk(count, dim)
                words = DIMS.get(dim, f"dim {dim}")
                yield f"run on the {words} of each of {count} ranks alone", _made(segment, places)
        if len(shape) > 1:
            flat = torch.arange(math.prod(shape)).chunk(count)
            yield f"run on the flat shard of each of {count} ranks alone", _made(segment, flat)


def _made(segment: Segment, places: tuple[torch.Tensor, ...]) -> Enclosure:
    """Return the enclosure of the role, put together from steps of parts.

    places: of the elements of each part, in its shape.
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
        exact[there], bound[there] = step.enclosures(part, segment.scalars)[segment.role]
    return Enclosure(exact, bound)
