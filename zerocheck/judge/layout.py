"""One flat vector per role: where each parameter lies in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..case.schema import Case
from ..contract.groups import group_of

Elements = torch.Tensor | None
"""Positions in the flat vector (int64), or None for all of them."""


@dataclass(frozen=True)
class Place:
    """A parameter's place: [start, stop) in elements of the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    trainable: bool
    group: int


@dataclass(frozen=True)
class Layout:
    """All parameters of a model, in the order of `named_parameters()`, tied aliases once."""

    places: tuple[Place, ...]
    size: int
    by_name: dict[str, Place]
    trainable: torch.Tensor
    """Mask over the flat vector."""
    buffers: dict[str, torch.Tensor]
    """Initial buffers by name."""
    _segments: dict[tuple[tuple[int, int], ...], list[tuple[int, int, Elements]]] = field(
        default_factory=dict
    )

    @classmethod
    def of(cls, model: nn.Module, case: Case) -> Layout:
        """The layout of an unwrapped model."""
        places: list[Place] = []
        start = 0
        for name, parameter in model.named_parameters():
            stop = start + parameter.numel()
            group = group_of(case, name) if parameter.requires_grad else -1
            places.append(
                Place(name, tuple(parameter.shape), start, stop, parameter.requires_grad, group)
            )
            start = stop
        trainable = torch.zeros(start, dtype=torch.bool)
        for place in places:
            if place.trainable:
                trainable[place.start : place.stop] = True
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return cls(tuple(places), start, {p.name: p for p in places}, trainable, buffers)

    def at(self, element: int) -> tuple[Place, tuple[int, ...]]:
        """The parameter that holds a flat element, and the index within it."""
        for place in self.places:
            if place.start <= element < place.stop:
                rest = element - place.start
                index: list[int] = []
                for size in reversed(place.shape):
                    index.append(rest % size)
                    rest //= size
                return place, tuple(reversed(index))
        raise IndexError(element)

    def names_of(self, mask: torch.Tensor, weight: torch.Tensor) -> tuple[str, ...]:
        """Names of the parameters with an element in `mask`, the largest `weight` there first."""
        worst: list[tuple[float, str]] = []
        for place in self.places:
            inside = mask[place.start : place.stop]
            if bool(inside.any()):
                value = float(weight[place.start : place.stop][inside].max())
                worst.append((-value, place.name))
        return tuple(name for _, name in sorted(worst))

    def spread(self, values: Sequence[bool]) -> torch.Tensor:
        """A mask over the flat vector from one flag per parameter."""
        if all(values):
            return torch.ones(self.size, dtype=torch.bool)
        mask = torch.zeros(self.size, dtype=torch.bool)
        for place, value in zip(self.places, values, strict=True):
            if value:
                mask[place.start : place.stop] = True
        return mask

    def segments(self, keys: Sequence[int | None]) -> list[tuple[int, int, Elements]]:
        """(group, key, elements) of the trainable parameters that share group and key.

        keys: one per parameter, e.g. its number of steps; None leaves the parameter out.
        """
        wanted = tuple(
            (place.group, -1 if key is None else key)
            for place, key in zip(self.places, keys, strict=True)
        )
        found = self._segments.get(wanted)
        if found is None:
            found = self._segments[wanted] = self._split(wanted)
        return found

    def _split(self, wanted: tuple[tuple[int, int], ...]) -> list[tuple[int, int, Elements]]:
        result: list[tuple[int, int, Elements]] = []
        for group, key in sorted(set(wanted)):
            if group < 0 or key < 0:
                continue
            mask = self.spread([pair == (group, key) for pair in wanted])
            result.append((group, key, None if bool(mask.all()) else mask.nonzero().reshape(-1)))
        return result
