"""Known causes of shards that do not tile their tensors, from all shards of a role."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch

from ... import causes as bugs
from ...case.mesh import Mesh
from ...machine.hosts import Hosts, places
from ...protocol.observations import Entry

Shape = tuple[int, ...]
Held = Sequence[tuple[int, Entry]]


class Tiling(NamedTuple):
    """Shards of all tensors of a role, by rank.

    shapes: as the model has them; held: by name, (rank, entry) of what is there; hosts: on which
    the ranks are, as in a case; replicated: the mesh, if it has a replicate axis.
    """

    shapes: Mapping[str, Shape]
    held: Mapping[str, Held]
    world_size: int
    hosts: Hosts = ()
    replicated: Mesh | None = None


def of_tiling(tiling: Tiling) -> tuple[str, ...]:
    """Find all causes of elements that are held by no rank, or by too many."""
    masks = {name: _masks(tiling, name) for name in tiling.shapes if tiling.held.get(name)}
    masks = {name: mask for name, mask in masks.items() if mask.shape[1]}
    return tuple(_of_masks(tiling, masks))


def of_replicas(tiling: Tiling) -> tuple[str, ...]:
    """Find all causes of shards that tile their tensors, while replicas hold different elements."""
    assert tiling.replicated is not None
    found = [_masks(tiling, name) for name in tiling.shapes if tiling.held.get(name)]
    found = [counts for counts in found if not bool(counts.all())]  # what is whole says nothing
    firsts = [tiling.replicated.group(rank, "shard")[0] for rank in range(tiling.world_size)]
    causes = []
    if all(torch.equal(counts, counts[firsts]) for counts in found):
        causes.append(bugs.CUT_OVER_THE_REPLICATE_AXIS)
    idle = [r for r in range(tiling.world_size) if not any(bool(c[r].any()) for c in found)]
    if not idle and all(bool((counts.sum(0) == 1).all()) for counts in found):
        causes.append(bugs.CUT_OVER_ALL_RANKS)
    return tuple(causes) or (bugs.REPLICAS_HOLD_OTHER_PARTS,)


def of_nothing(tiling: Tiling, shape: Shape) -> tuple[str, ...]:
    """Find all causes of a tensor of this shape that no rank has."""
    if not math.prod(shape):
        return (bugs.EMPTY_PARAMETER_LEFT_OUT,)
    masks = {name: _masks(tiling, name) for name in tiling.shapes if tiling.held.get(name)}
    local = _by_local_rank(tiling, masks) and any(bool(counts.any()) for counts in masks.values())
    return (bugs.PARAMETER_LEFT_OUT, *([bugs.SHARD_OF_THE_LOCAL_RANK] if local else []))


def of_shapes(tiling: Tiling) -> tuple[str, ...]:
    """Find all causes of a global shape other than the model's."""
    wrong = [
        (entry.shape, tiling.shapes[name])
        for name, held in tiling.held.items()
        if name in tiling.shapes
        for _, entry in held
        if entry.shape != tiling.shapes[name]
    ]
    world = tiling.world_size
    if wrong and all(
        shape and given == (-(-shape[0] // world) * world, *shape[1:]) for given, shape in wrong
    ):
        return (bugs.PADDED_SHAPE,)
    return (bugs.ANOTHER_SHAPE,)


def _masks(tiling: Tiling, name: str) -> torch.Tensor:
    """Count how often each rank holds each element: (ranks, elements) int."""
    shape = tiling.shapes[name]
    numel = math.prod(shape)
    counts = torch.zeros(tiling.world_size, numel, dtype=torch.int32)
    for rank, entry in tiling.held[name]:
        if entry.box is None:
            counts[rank, entry.start : entry.stop] += 1
        else:
            counts[rank].view(shape)[tuple(slice(*part) for part in entry.box)] += 1
    return counts


def _of_masks(tiling: Tiling, masks: Mapping[str, torch.Tensor]) -> Iterator[str]:
    if any(bool((counts > 1).any()) for counts in masks.values()):
        yield bugs.TWICE_ON_ONE_RANK
        return
    if any(_overlaps(counts) for counts in masks.values()):
        yield bugs.SHARDS_OVERLAP
    missing = {name: counts.sum(0) == 0 for name, counts in masks.items()}
    gaps = {name: gap for name, gap in missing.items() if bool(gap.any())}
    if not gaps:
        return
    world = tiling.world_size
    if _by_local_rank(tiling, masks):
        yield bugs.SHARD_OF_THE_LOCAL_RANK
    if world > 1 and all(bool((masks[name] == masks[name][0]).all()) for name in masks):
        yield bugs.SAME_SHARD_ON_EVERY_RANK
        return
    sizes = {name: len(gap) for name, gap in missing.items()}
    if all(torch.equal(gap, _tail(sizes[n], sizes[n] % world)) for n, gap in missing.items()):
        yield bugs.REMAINDER_DROPPED
    idle = [rank for rank in range(world) if not any(bool(m[rank].any()) for m in masks.values())]
    if idle and world > 1:
        yield bugs.RANK_LEFT_OUT


def _by_local_rank(tiling: Tiling, masks: Mapping[str, torch.Tensor]) -> bool:
    """Return True if ranks hold the same for equal local ranks, and share nothing otherwise."""
    local = [place.local_rank for place in places(tiling.hosts, tiling.world_size)]
    if len(set(local)) == len(local):
        return False
    for counts in masks.values():
        for rank, other in combinations(range(len(local)), 2):
            if local[rank] == local[other]:
                if not torch.equal(counts[rank], counts[other]):
                    return False
            elif bool((counts[rank].bool() & counts[other].bool()).any()):
                return False
    return True


def _overlaps(counts: torch.Tensor) -> bool:
    """Return True if ranks with different shards hold some element both."""
    holders = counts.bool()
    for rank in range(len(holders)):
        for other in range(rank):
            both = holders[rank] & holders[other]
            if bool(both.any()) and not torch.equal(holders[rank], holders[other]):
                return True
    return False


def _tail(size: int, count: int) -> torch.Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[size - count :] = True
    return mask
