"""Layout of a model in a flat vector per role: the place of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from ..case.schema import Case
from ..case.shapes import unfrozen
from ..contract.groups import group_of
from ..contract.memory_order import in_memory_order, order_of
from ..floating_point import FP32, Enclosure, Format
from . import vectors
from .pieces import Positions, in_pieces

Elements = torch.Tensor | None
"""Positions in the flat vector (int64), or None for all of them."""


Buffers = Mapping[str, torch.Tensor]
"""Buffers of a rank, by name."""


@dataclass(frozen=True)
class Formats:
    """Formats of a vector's elements: (format, its elements), every element once."""

    parts: tuple[tuple[Format, Elements], ...]
    size: int

    @property
    def narrow(self) -> Format | None:
        """Format that is narrower than fp32, if any element has one."""
        return next((format for format, _ in self.parts if format.narrow), None)

    def enclose(self, make: Callable[..., Enclosure], *vectors: torch.Tensor) -> Enclosure:
        """Apply make(*elements, format) to the elements of each format, and join the results."""
        if len(self.parts) == 1:
            return make(*vectors, self.parts[0][0])
        exact = torch.zeros(self.size, dtype=torch.float64)
        bound = torch.zeros(self.size, dtype=torch.float64)
        for format, elements in self.parts:
            made = make(*(vector[elements] for vector in vectors), format)
            exact[elements], bound[elements] = made
        return Enclosure(exact, bound)

    def at(self, index: Positions | None) -> Formats:
        """Return the formats of the elements at these positions, in their order."""
        if index is None:
            return self
        if isinstance(index, slice):
            return self._within(*index.indices(self.size)[:2])
        if len(self.parts) == 1:
            return Formats(((self.parts[0][0], None),), len(index))
        number = torch.zeros(self.size, dtype=torch.int64)
        for position, (_, elements) in enumerate(self.parts):
            number[elements] = position
        here = number[index]
        found: list[tuple[Format, Elements]] = []
        for position, (format, _) in enumerate(self.parts):
            elements = (here == position).nonzero().reshape(-1)
            if len(elements):
                found.append((format, elements))
        if len(found) < 2:
            found = [(found[0][0] if found else FP32, None)]
        return Formats(tuple(found), len(index))

    def _within(self, start: int, stop: int) -> Formats:
        """Return the formats of a range. The elements of each part are in ascending order."""
        found: list[tuple[Format, Elements]] = []
        for format, elements in self.parts if len(self.parts) > 1 else ():
            assert elements is not None
            low, high = torch.searchsorted(elements, torch.tensor([start, stop])).tolist()
            if high > low:
                found.append((format, elements[low:high] - start))
        if len(found) < 2:
            found = [(found[0][0] if found else self.parts[0][0], None)]
        return Formats(tuple(found), stop - start)


class KernelRange(NamedTuple):
    """Trainable elements that one kernel call would update with one set of scalars.

    key: what they share besides, e.g. their number of steps.
    """

    group: int
    key: int
    format: Format
    elements: Elements


@dataclass(frozen=True)
class ParameterPlace:
    """Place of a parameter: [start, stop) in elements of the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    trainable: bool
    group: int
    format: Format = FP32
    strides: tuple[int, ...] | None = None
    """In elements; None: contiguous."""


@dataclass(frozen=True)
class ParameterLayout:
    """All parameters of a model, in the order of `named_parameters()`, tied aliases once."""

    places: tuple[ParameterPlace, ...]
    size: int
    by_name: dict[str, ParameterPlace]
    trainable: torch.Tensor
    """Mask over the flat vector."""
    buffers: dict[str, torch.Tensor]
    """Initial buffers by name."""
    formats: Formats
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names of tied parameters -> the name that they go by."""
    _segments: dict[tuple[tuple[int, int, Format], ...], list[KernelRange]] = field(
        default_factory=dict
    )

    def modules(self) -> dict[str, list[slice]]:
        """Return, for each module that has parameters, where they lie; not for the whole model."""
        found: dict[str, list[slice]] = {}
        for place in self.places:
            path = place.name.rpartition(".")[0]
            while path:
                found.setdefault(path, []).append(slice(place.start, place.stop))
                path = path.rpartition(".")[0]
        whole = len(self.places)
        return {path: slices for path, slices in found.items() if len(slices) < whole}

    @classmethod
    def of(cls, model: nn.Module, case: Case) -> ParameterLayout:
        """Build the layout of an unwrapped model. Parameters unfrozen later count as trainable."""
        later = set(unfrozen(case))
        places: list[ParameterPlace] = []
        start = 0
        for name, parameter in model.named_parameters():
            stop = start + parameter.numel()
            trains = parameter.requires_grad or name in later
            group = group_of(case, name) if trains else -1
            format = Format.of(parameter.dtype)
            strides = None if parameter.is_contiguous() else parameter.stride()
            shape = tuple(parameter.shape)
            places.append(ParameterPlace(name, shape, start, stop, trains, group, format, strides))
            start = stop
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return cls.of_places(places, buffers=buffers, aliases=_aliases(model))

    @classmethod
    def of_places(
        cls,
        places: Sequence[ParameterPlace],
        *,
        buffers: dict[str, torch.Tensor] | None = None,
        aliases: dict[str, str] | None = None,
    ) -> ParameterLayout:
        """Build the layout of places that follow each other from 0 on."""
        size = places[-1].stop if places else 0
        trainable = torch.zeros(size, dtype=torch.bool)
        for place in places:
            if place.trainable:
                trainable[place.start : place.stop] = True
        return cls(
            tuple(places),
            size,
            {place.name: place for place in places},
            trainable,
            buffers or {},
            _formats(places, size),
            aliases or {},
        )

    @cached_property
    def memory_order(self) -> torch.Tensor | None:
        """Positions of all elements in each parameter's memory order, (size,) int64.

        None where every parameter is contiguous.
        """
        if all(place.strides is None for place in self.places):
            return None
        order = vectors.ranges([0], [self.size])
        for place in self.places:
            if place.strides is not None:
                slots = order[place.start : place.stop].view(place.shape)
                dims = order_of(place.shape, place.strides)
                order[place.start : place.stop] = in_memory_order(slots, dims).clone()
        return order

    def at(self, element: int) -> tuple[ParameterPlace, tuple[int, ...]]:
        """Return the parameter that holds a flat element, and the index within it."""
        for place in self.places:
            if place.start <= element < place.stop:
                rest = element - place.start
                index: list[int] = []
                for size in reversed(place.shape):
                    index.append(rest % size)
                    rest //= size
                return place, tuple(reversed(index))
        raise IndexError(element)

    def names_of(self, mask: torch.Tensor) -> tuple[str, ...]:
        """Return the names of the parameters with an element in `mask`, in their order."""
        return tuple(p.name for p in self.places if bool(mask[p.start : p.stop].any()))

    def spread(self, values: Sequence[bool]) -> torch.Tensor:
        """Expand one flag per parameter to a mask over the flat vector."""
        if all(values):
            return torch.ones(self.size, dtype=torch.bool)
        mask = torch.zeros(self.size, dtype=torch.bool)
        for place, value in zip(self.places, values, strict=True):
            if value:
                mask[place.start : place.stop] = True
        return mask

    def segments(self, keys: Sequence[int | None]) -> list[KernelRange]:
        """Group the trainable parameters that share group, key and format.

        keys: one per parameter, e.g. its number of steps; None leaves the parameter out.
        """
        wanted = tuple(
            (place.group, -1 if key is None else key, place.format)
            for place, key in zip(self.places, keys, strict=True)
        )
        found = self._segments.get(wanted)
        if found is None:
            if in_pieces(None, self.size):  # numbers of steps change, and an index is large
                self._segments.clear()
            found = self._segments[wanted] = self._split(wanted)
        return found

    def _split(self, wanted: tuple[tuple[int, int, Format], ...]) -> list[KernelRange]:
        result: list[KernelRange] = []
        distinct = dict.fromkeys(wanted)  # in an order of its own, which a set has not
        for group, key, format in sorted(distinct, key=lambda w: (w[0], w[1], w[2].u)):
            if group < 0 or key < 0:
                continue
            alike = [
                place
                for place, one in zip(self.places, wanted, strict=True)
                if one == (group, key, format)
            ]
            result.append(KernelRange(group, key, format, self._elements(alike)))
        return result

    def _elements(self, places: Sequence[ParameterPlace]) -> Elements:
        whole = sum(place.stop - place.start for place in places) == self.size
        return None if whole else _positions(places)


def _aliases(model: nn.Module) -> dict[str, str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: names[parameter] for name, parameter in every if names[parameter] != name}


def _formats(places: Sequence[ParameterPlace], size: int) -> Formats:
    every = list(dict.fromkeys(place.format for place in places))
    if len(every) < 2:
        return Formats(((every[0] if every else FP32, None),), size)
    parts = []
    for format in sorted(every, key=lambda one: one.u):
        alike = [place for place in places if place.format == format]
        parts.append((format, _positions(alike)))
    return Formats(tuple(parts), size)


def _positions(places: Sequence[ParameterPlace]) -> torch.Tensor:
    return vectors.ranges([p.start for p in places], [p.stop - p.start for p in places])
