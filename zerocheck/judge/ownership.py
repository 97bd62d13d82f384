"""Obligation: the shards of every tensor tile it exactly once, replicas aside."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from .. import causes as bugs
from ..case.mesh import Mesh
from ..causes.registry import said
from ..contract.shard import Role
from ..errors import did_you_mean
from ..machine.hosts import Hosts
from ..protocol.observations import Entry, Point
from ..protocol.verdicts import Explanation, Violation
from .diagnose.ownership import Tiling, of_nothing, of_replicas, of_shapes, of_tiling
from .layout import ParameterLayout

Key = tuple[int, int, tuple[tuple[int, int], ...] | None]


class Shards(Protocol):
    """Places of the shards of all ranks, by step, point and role: `assemble.Observation`."""

    @property
    def layout(self) -> ParameterLayout: ...

    @property
    def world_size(self) -> int: ...

    @property
    def states(self) -> tuple[str, ...]: ...

    @property
    def replicated(self) -> Mesh | None: ...

    def manifests(self, step: int, point: Point, role: str) -> tuple[tuple[int, ...], ...]:
        """Return, per rank, the manifest numbers of a role; equal numbers have equal entries."""

    def entries(self, step: int, point: Point, role: str) -> list[list[Entry]]:
        """Return, per rank, the places of all its shards of a role."""


class Ownership:
    """Check of all points; manifests that were checked already are not checked again."""

    def __init__(self, observation: Shards, hosts: Hosts = (), *, masters: bool = False) -> None:
        """Start unchecked. hosts: of the ranks, as in a case; masters: True if declared."""
        self._masters = masters
        self._observation = observation
        self._hosts = hosts
        self._layout = observation.layout
        self._fine: set[tuple[str, tuple[tuple[int, ...], ...]]] = set()

    def check(self, step: int, point: Point) -> Violation | None:
        """Find the first violation among all roles at this point, or None."""
        if point == "state":
            roles: tuple[Role, ...] = (
                "parameter",
                "master",
                *self._observation.states,
                "buffer",
                "step",
            )
        else:
            roles = ("gradient",)
        for role in roles:
            key = (role, self._observation.manifests(step, point, role))
            if key in self._fine:
                continue
            violation = self._check(step, role, self._observation.entries(step, point, role))
            if violation is not None:
                return violation
            self._fine.add(key)
        return None

    def _check(self, step: int, role: Role, entries: list[list[Entry]]) -> Violation | None:
        known = self._shapes(role)
        by_name: dict[str, list[tuple[int, Entry]]] = {}
        for rank, held in enumerate(entries):
            for entry in held:
                if entry.present or entry.name in known:
                    by_name.setdefault(entry.name, []).append((rank, entry))
        tiling = Tiling(
            known,
            {
                name: [(rank, entry) for rank, entry in shards if entry.present]
                for name, shards in by_name.items()
            },
            self._observation.world_size,
            self._hosts,
            self._observation.replicated,
        )
        for name, shards in by_name.items():
            ranks = tuple(sorted({rank for rank, _ in shards}))
            if name not in known:
                problem, found = self._unknown(role, name, known)
                return _violation(step, role, name, ranks, problem, found)
            for rank, entry in shards:
                if entry.shape != known[name]:
                    return _violation(
                        step,
                        role,
                        name,
                        ranks,
                        f"{role} {name!r} has the global shape {list(entry.shape)} on rank {rank}; "
                        f"the model has {list(known[name])}",
                        of_shapes(tiling),
                    )
        if role == "step":
            return None
        for name, shape in known.items():
            here = tiling.held.get(name, [])
            if not here:
                if role in ("parameter", "buffer") or (role == "master" and self._masters):
                    problem = f"no rank holds {role} {name!r}"
                    found = of_nothing(tiling, shape)
                    return _violation(step, role, name, (), problem, found)
                continue
            problem = tiling_fault(here, shape)
            if problem:
                ranks = tuple(sorted({rank for rank, _ in here}))
                problem, found = f"{role} {name!r}: {problem}", of_tiling(tiling)
                alias = next((a for a, of in self._layout.aliases.items() if of == name), None)
                if alias is not None and bugs.TWICE_ON_ONE_RANK in found:
                    problem += f": {alias!r}, which is tied to it, is a tensor of its own"
                    found = (bugs.UNTIED,)
                return _violation(step, role, name, ranks, problem, found)
            apart = replica_fault(by_name[name], tiling.replicated)
            if apart is not None:
                words_, *differing = apart
                problem = f"{role} {name!r}: {words_}"
                return _violation(step, role, name, tuple(differing), problem, of_replicas(tiling))
        return None

    def _unknown(
        self, role: Role, name: str, known: Collection[str]
    ) -> tuple[str, tuple[str, ...]]:
        """Return (explanation, causes) for a name that no shard of this role may have."""
        if role != "buffer" and name in self._layout.by_name:
            problem = f"shards() gives a {role} of {name!r}, which is frozen and must have none"
            return problem, (bugs.STATE_OF_A_FROZEN_PARAMETER,)
        other = self._layout.aliases.get(name)
        if role != "buffer" and other is not None:
            problem = f"shards() names {role} {name!r}, which is {other!r} by another name"
            return problem, (bugs.UNTIED,)
        problem = f"shards() names {role} {name!r}, which the model does not have"
        return problem + did_you_mean(name, known), (bugs.UNKNOWN_NAME,)

    def _shapes(self, role: Role) -> dict[str, tuple[int, ...]]:
        if role == "buffer":
            return {name: tuple(b.shape) for name, b in self._layout.buffers.items()}
        if role == "step":
            return {place.name: () for place in self._layout.places if place.trainable}
        return {
            place.name: place.shape
            for place in self._layout.places
            if role == "parameter" or place.trainable
        }


def tiling_fault(shards: Sequence[tuple[int, Entry]], shape: tuple[int, ...]) -> str:
    """Return the explanation of an error in the tiling, or an empty string.

    Equal ranges on different ranks are replicas; the same range twice on one rank is not.
    """
    numel = 1
    for size in shape:
        numel *= size
    holders: dict[Key, list[int]] = {}
    for rank, entry in shards:
        holders.setdefault((entry.start, entry.stop, entry.box), []).append(rank)
    for (start, stop, _), ranks in holders.items():
        if len(set(ranks)) < len(ranks) and stop > start:
            return f"elements {start} to {stop - 1} stand twice on rank {_first_double(ranks)}"
    distinct = [key for key in holders if key[1] > key[0]]
    if any(box is not None for _, _, box in distinct):
        return _tiling_of_boxes(distinct, shape, numel)
    end = 0
    previous: Key | None = None
    for key in sorted(distinct, key=lambda key: key[:2]):
        start, stop, _ = key
        if start > end:
            return f"no rank holds elements {end} to {start - 1} of {numel}"
        if start < end and previous is not None:
            return (
                f"elements {start} to {min(end, stop) - 1} are held by rank "
                f"{holders[previous][0]} as part of {previous[0]} to {previous[1] - 1} and by rank "
                f"{holders[key][0]} as part of {start} to {stop - 1}"
            )
        end, previous = max(end, stop), key
    return "" if end == numel else f"no rank holds elements {end} to {numel - 1} of {numel}"


def replica_fault(
    shards: Sequence[tuple[int, Entry]], replicated: Mesh | None
) -> tuple[str, int, int] | None:
    """Return (explanation, two ranks) if replicas of a shard hold different elements.

    That is, ranks along the replicate axis. replicated: as in `RoleState`.

    A gradient that is None on one of them is left to the obligation `gradient`.
    """
    if replicated is None:
        return None
    held: list[set[Key]] = [set() for _ in range(replicated.world_size)]
    for rank, entry in shards:
        if entry.present and entry.stop > entry.start:
            held[rank].add((entry.start, entry.stop, entry.box))
    none = {rank for rank, entry in shards if not entry.present}
    for rank in range(replicated.world_size):
        first = replicated.group(rank, "replicate")[0]
        here, there = held[rank], held[first]
        if here != there and not none & {first, rank}:
            return (
                f"rank {rank} holds {_ranges(here)}, and rank {first}, which has the same place on "
                f"the shard axis, holds {_ranges(there)}; they must be replicas",
                first,
                rank,
            )
    return None


def _ranges(keys: Collection[Key]) -> str:
    """Format ranges in words: `"elements 0 to 3 and 6 to 7"`."""
    parts = [
        f"{start} to {stop - 1}" if box is None else " x ".join(f"{a}:{b}" for a, b in box)
        for start, stop, box in sorted(keys, key=lambda key: key[:2])
    ]
    return f"elements {' and '.join(parts)}" if parts else "nothing"


def _tiling_of_boxes(distinct: list[Key], shape: tuple[int, ...], numel: int) -> str:
    boxes = []
    for start, stop, box in distinct:
        if box is None:
            box = _box(start, stop, shape)
            if _volume(box) != stop - start:
                return "flat ranges and ranges per dim are mixed"
        boxes.append(box)
    for position, one in enumerate(boxes):
        for other in boxes[:position]:
            if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True)):
                return f"the ranges {one} and {other} overlap"
    held = sum(_volume(box) for box in boxes)
    return "" if held == numel else f"{numel - held} of {numel} elements are held by no rank"


def _box(start: int, stop: int, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the box from element `start` to `stop - 1`: the flat range, if it has its size."""
    low, high = start, stop - 1
    box: list[tuple[int, int]] = []
    for size in reversed(shape):
        box.append((low % size, high % size + 1))
        low, high = low // size, high // size
    return tuple(reversed(box))


def _volume(box: tuple[tuple[int, int], ...]) -> int:
    volume = 1
    for low, high in box:
        volume *= high - low
    return volume


def _first_double(ranks: list[int]) -> int:
    return next(rank for rank in ranks if ranks.count(rank) > 1)


def _violation(
    step: int, role: str, name: str, ranks: tuple[int, ...], text: str, causes: tuple[str, ...]
) -> Violation:
    explanation = Explanation.of(causes, said(causes), text)
    return Violation(
        obligation="ownership",
        step=step,
        role=role,
        tensors=(name,),
        ranks=ranks,
        explanation=explanation.text,
        causes=causes,
        sentences=explanation.sentences,
    )
