"""Device mesh with named axes. Code asks for an axis by its name, never by its position.

An axis declares what it splits. What follows from that is computed and not listed: the ranks that
read samples of their own, and the parts in which a copy of the parameters is held.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, get_args

AxisName = Literal["pp", "replicate", "shard", "ep", "cp", "tp"]
AXES: tuple[AxisName, ...] = get_args(AxisName)
"""Names of all axes that a case can have, outermost first."""

Split = Literal["batch", "parameters", "activations"]

SPLITS: Mapping[AxisName, frozenset[Split]] = {
    "pp": frozenset(("parameters", "activations")),
    "replicate": frozenset(("batch",)),
    "shard": frozenset(("batch", "parameters")),
    "ep": frozenset(("batch", "parameters", "activations")),
    "cp": frozenset(("parameters", "activations")),
    "tp": frozenset(("parameters", "activations")),
}
"""Splits of each axis. Along replicate, ranks hold equal shards. Where activations are split, ranks
compute together: some of the experts (ep), or of the same samples some of the layers (pp), parts of
the sequences (cp), or parts of each layer (tp)."""


INNER: Mapping[AxisName, str] = {
    "tp": "tensor_parallel",
    "cp": "context_parallel",
    "ep": "expert_parallel",
    "pp": "pipeline_parallel",
}
"""Axes within the last size of `Case.mesh`, and the field of `Sharding` with the size of each."""


@dataclass(frozen=True)
class Axis:
    """Axis of a mesh. Raises ValueError for a size below 1."""

    name: AxisName
    size: int
    splits: frozenset[Split]
    """Parts of training that differ between the ranks along it."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"mesh axis {self.name!r} has size {self.size}; allowed: 1 or more")


@dataclass(frozen=True)
class Mesh:
    """Ranks on axes, outermost first: neighbouring ranks differ on the last one.

    A name that the mesh does not have is an axis of size 1. Raises ValueError for no axis, or for
    two of one name; its methods do for a rank that the mesh does not have.
    """

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        if not self.axes or len(set(self.names)) < len(self.axes):
            raise ValueError(f"mesh axes {list(self.names)}; allowed: one or more, once each")

    @cached_property
    def names(self) -> tuple[AxisName, ...]:
        """Names of the axes, in order, as `init_device_mesh` takes them."""
        return tuple(axis.name for axis in self.axes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the axes, in order, as `init_device_mesh` takes them."""
        return tuple(axis.size for axis in self.axes)

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """Map the name of each axis to its size, and to the distance of neighbours along it."""
        places: dict[str, tuple[int, int]] = {}
        stride = 1
        for axis in reversed(self.axes):
            places[axis.name] = axis.size, stride
            stride *= axis.size
        return places

    def has(self, name: AxisName) -> bool:
        """Return True if the mesh has the axis, of whatever size."""
        return name in self._places

    def size(self, name: AxisName) -> int:
        """Return the number of ranks along an axis."""
        return self._places.get(name, (1, 1))[0]

    def coordinate(self, rank: int, name: AxisName) -> int:
        """Return the place of a rank on an axis, from 0."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} of a mesh of {self.world_size} ranks")
        size, stride = self._places.get(name, (1, 1))
        return rank // stride % size

    def group(self, rank: int, name: AxisName) -> tuple[int, ...]:
        """Return the ranks along an axis through a rank, in order: they differ on it alone."""
        size, stride = self._places.get(name, (1, 1))
        first = rank - self.coordinate(rank, name) * stride
        return tuple(range(first, first + size * stride, stride))

    def groups(self, name: AxisName) -> tuple[tuple[int, ...], ...]:
        """Return the groups of all ranks along an axis, each once, by their first rank."""
        return tuple(dict.fromkeys(self.group(rank, name) for rank in range(self.world_size)))

    def parts(self, what: Split) -> int:
        """Return the number of parts into which the axes split something."""
        return math.prod(axis.size for axis in self.axes if what in axis.splits)

    @cached_property
    def data_parallel_size(self) -> int:
        """Number of data-parallel ranks: those that read samples of their own."""
        return self.parts("batch")

    def data_parallel_rank(self, rank: int) -> int:
        """Return the index of the data-parallel rank that this rank is, or is a part of."""
        index = 0
        for axis in self.axes:
            if "batch" in axis.splits:
                index = index * axis.size + self.coordinate(rank, axis.name)
        return index


Frequency = Literal["often", "seldom"]
"""Share of the drawn cases that have an inner axis. Fixed fields have it in place of a size."""


def frequencies_of(fixed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Frequency]]:
    """Part fixed fields into those with a value, and the frequencies of inner axes by path."""
    sharding = dict(fixed.get("sharding", {}))
    names = [name for name in INNER.values() if isinstance(sharding.get(name), str)]
    frequencies = {f"sharding.{name}": sharding.pop(name) for name in names}
    return ({**fixed, "sharding": sharding} if frequencies else dict(fixed)), frequencies


def drawn_size(axis: AxisName, frequency: Frequency, seed: int, ranks: int) -> int:
    """Draw the size of an inner axis by the seed: all other choices stay.

    Seldom: one case of 23 has some, and one more as much as there is. Often: each size is drawn
    alike, and most often one that leaves ranks for other axes.
    """
    sizes = [size for size in range(2, ranks) if ranks % size == 0]
    if frequency == "often":
        # Of each axis by itself. Only random() is used: its sequence is promised to stay.
        drawn = random.Random(f"{axis} {seed}").random()
        sizes = [1, *sizes, *sizes, ranks]
        return sizes[int(drawn * len(sizes))]
    kind, seed = seed % 23, seed // 23
    if kind == 5 and ranks > 1:
        return ranks
    return sizes[seed % len(sizes)] if kind == 11 and sizes else 1


def fits(sizes: Sequence[int], inner: Sequence[int]) -> bool:
    """Return True if there is a mesh of these sizes: see `mesh_of`.

    Inner axes and a replicate axis exclude one another, since no implementation has both.
    """
    ranks = math.prod(inner)
    return ranks == 1 or (len(sizes) == 1 and sizes[0] % ranks == 0)


@cache
def mesh_of(sizes: tuple[int, ...], inner: tuple[int, ...] = ()) -> Mesh:
    """Return the mesh of a case's fields; an inner axis of size 1 is left out.

    sizes: (S,) or (R, S), as `Case.mesh`; inner: sizes of INNER, of the first ones. Raises
    ValueError if these do not divide S.
    """
    ranks = math.prod(inner)
    if sizes[-1] % ranks:
        raise ValueError(f"inner axes {list(inner)} do not divide {sizes[-1]} ranks")
    given: dict[AxisName, int] = {"shard": sizes[-1] // ranks}
    if len(sizes) > 1:
        given["replicate"] = sizes[0]
    given |= {name: size for name, size in zip(INNER, inner, strict=False) if size > 1}
    return Mesh(tuple(Axis(name, given[name], SPLITS[name]) for name in AXES if name in given))
