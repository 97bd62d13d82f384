"""Attribution of a gradient to shards of other ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..flat import NOBODY
from .cells import HeldCell
from .gradient import GradientSearch
from .table import rows, solve


def exchanged(search: GradientSearch) -> tuple[list[str], list[int]]:
    """Return (sentences, numbers of the cells) of holders that hold what others must hold.

    All of a holder's shard, in order, or of each tensor of it its part of that tensor.
    """
    by_holder: dict[tuple[int, ...], list[int]] = {}
    for number in search.open:
        by_holder.setdefault(search.cells[number].holder.ranks, []).append(number)
    slots = _slots(search)
    if slots is not None:
        mixed = _mixed(search, by_holder, slots)
        if mixed is not None:
            return [mixed], [number for numbers in by_holder.values() for number in numbers]
    explained: list[int] = []
    origins: dict[int, int] = {}
    for ranks, numbers in by_holder.items():
        origin = _origin(search, [search.cells[number] for number in numbers])
        if origin is not None:
            origins.update(dict.fromkeys(ranks, origin))
            explained += numbers
    return _sentences(origins, len(search.evidence.held.plans)), explained


def _slots(search: GradientSearch) -> torch.Tensor | None:
    """Return the position of each slot of all shards in the flat buffers, (ranks, slots)."""
    buffers = search.evidence.buffers
    if not buffers:
        return None
    return torch.cat([buffer.shards for buffer in buffers], 1)


def _mixed(
    search: GradientSearch, by_holder: Mapping[tuple[int, ...], list[int]], slots: torch.Tensor
) -> str | None:
    """Return words if every shard is one combination of all ranks' shards, slot by slot."""
    right = search.evidence.right.whole
    found: set[float] = set()
    for ranks in by_holder:
        holder = search.cells[by_holder[ranks][0]].holder
        if holder.elements is None or len(ranks) > 1:
            return None
        held = torch.full((len(right.exact),), torch.nan, dtype=torch.float64)
        held[holder.elements] = holder.part.to(torch.float64)
        own = slots[ranks[0]]
        inside = (own != NOBODY) & ~held[own.clamp(min=0)].isnan()
        terms = torch.where(slots != NOBODY, right.exact[slots.clamp(min=0)], 0.0)[:, inside]
        bound = torch.where(slots != NOBODY, right.bound[slots.clamp(min=0)], 0.0)[:, inside].sum(0)
        observed = held[own[inside]]
        chosen = rows(len(observed))
        solution = solve(terms[:, chosen], observed[chosen], bound[chosen])
        if solution is None or bool(solution.values.isnan().any()):
            return None
        weights = set(solution.nearest(search.numbers))
        if len(weights) != 1:
            return None
        (weight,) = weights
        if bool(((observed - weight * terms.sum(0)).abs() > 2 * bound).any()):
            return None
        found |= weights
    if len(found) != 1 or found == {0.0} or not search.numbers.plain(*found):
        return None
    spelled = search.numbers.spelled(found.pop())
    return f"gradient: each shard is the sum of all ranks' shards, place by place, {spelled}"


def _origin(search: GradientSearch, chosen: list[HeldCell]) -> int | None:
    """Return the rank whose shard these cells are, or None."""
    holder = chosen[0].holder
    if holder.elements is None:
        return None
    right = search.evidence.right.whole
    part = holder.part.to(torch.float64)
    for rank, plan in enumerate(search.evidence.held.plans):
        if rank in holder.ranks or plan.index is None or torch.equal(plan.index, holder.elements):
            continue
        count = min(len(part), len(plan.index))
        there = plan.index[:count]
        fits = (part[:count] - right.exact[there]).abs() <= right.bound[there]
        informative = part[:count] != 0
        if int(informative.sum()) > 1 and bool(fits.all()):
            return rank
        if _by_tensor(search, chosen, plan.index):
            return rank
    return None


def _by_tensor(search: GradientSearch, chosen: list[HeldCell], index: torch.Tensor) -> bool:
    """Return True if each cell has the values that are right for another rank's part of it."""
    right = search.evidence.right.whole
    informative = 0
    for cell in chosen:
        there = index[(index >= cell.place.start) & (index < cell.place.stop)]
        count = min(len(there), len(cell.values))
        values, there = cell.values[:count], there[:count]
        if not bool(((values - right.exact[there]).abs() <= right.bound[there]).all()):
            return False
        informative += int((values != 0).sum())
    return informative > 1


def _sentences(origins: dict[int, int], world: int) -> list[str]:
    if not origins:
        return []
    distances = {(origin - rank) % world for rank, origin in origins.items()}
    if len(origins) == world and world > 2 and len(distances) == 1:
        (distance,) = distances
        which = {1: "the next rank", world - 1: "the rank before"}.get(
            distance, f"the rank {distance} further on"
        )
        return [f"gradient: each rank holds the shard that {which} must hold"]
    parts = [
        f"rank {rank} holds the shard that rank {origin} must hold"
        for rank, origin in origins.items()
    ]
    return [f"gradient: {' and '.join(parts)}"]
