"""Cells of an observed vector: the elements of one tensor that ranks hold alike."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..assemble import RoleState
from ..compare import same_bits
from ..layout import ParameterLayout, ParameterPlace


class Holder(NamedTuple):
    """Ranks that hold the same elements with the same bits."""

    ranks: tuple[int, ...]
    part: torch.Tensor
    """Values of their shards, flat."""
    elements: torch.Tensor | None
    """Position of each element in the flat vector; None: all of them, in order."""


class HeldCell(NamedTuple):
    """Elements of a tensor that a holder has."""

    holder: Holder
    place: ParameterPlace
    positions: torch.Tensor
    """In the flat vector, (elements,) int64."""
    values: torch.Tensor
    """Observed, float64."""


def holders(held: RoleState) -> list[Holder]:
    """Return the ranks of a role, those that hold the same together."""
    found: list[Holder] = []
    for rank, (part, plan) in enumerate(zip(held.parts, held.plans, strict=True)):
        for number, one in enumerate(found):
            if _same(one, part, plan.index):
                found[number] = one._replace(ranks=(*one.ranks, rank))
                break
        else:
            found.append(Holder((rank,), part, plan.index))
    return found


def _same(one: Holder, part: torch.Tensor, index: torch.Tensor | None) -> bool:
    if len(one.part) != len(part):
        return False
    if one.elements is None or index is None:
        alike = one.elements is index
    else:
        alike = one.elements is index or torch.equal(one.elements, index)
    return alike and (part is one.part or same_bits(one.part, part))


def cells(held: RoleState, layout: ParameterLayout, wrong: torch.Tensor) -> list[HeldCell]:
    """Return the cells of the tensors of which an element is in the mask `wrong`."""
    places = [
        place
        for place in layout.places
        if place.stop > place.start and bool(wrong[place.start : place.stop].any())
    ]
    found: list[HeldCell] = []
    for holder in holders(held):
        for place in places:
            if holder.elements is None:
                positions = torch.arange(place.start, place.stop)
                values = holder.part[place.start : place.stop]
            else:
                here = (holder.elements >= place.start) & (holder.elements < place.stop)
                positions, values = holder.elements[here], holder.part[here]
            if len(positions):
                found.append(HeldCell(holder, place, positions, values.to(torch.float64)))
    return found
