"""Features of the ranks: their number, their hosts, and the divisibility of sizes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ...hosts import counts
from ..mesh import AxisName
from ..schema import Case
from ..shapes import parameter_shapes, trainable
from .row import table


def _lengths(case: Case) -> list[int]:
    """Return the first dim's size of each non-empty trainable parameter; it is the sharded dim."""
    shapes = parameter_shapes(case.model)
    return [shapes[name][0] for name in trainable(case.model) if shapes[name] and all(shapes[name])]


def _uneven_total(case: Case) -> bool:
    shapes = parameter_shapes(case.model)
    total = sum(prod(shapes[name]) for name in trainable(case.model))
    return total % case.axes.parts("parameters") != 0


def _on_hosts(case: Case) -> tuple[int, ...]:
    """Return the number of ranks on each host."""
    return counts(case.hosts, case.world_size)


WORLD = table(
    ("world-1", "one rank", lambda c: c.world_size == 1),
    ("world-2", "2 ranks", lambda c: c.world_size == 2),
    ("world-3", "3 ranks", lambda c: c.world_size == 3),
    ("world-4", "4 ranks", lambda c: c.world_size == 4),
    ("world-5-8", "5 to 8 ranks", lambda c: 5 <= c.world_size <= 8),
    ("world-9-up", "9 ranks or more", lambda c: c.world_size >= 9),
    ("two-axes", "a mesh of two axes, replicate and shard", lambda c: c.axes.has("replicate")),
    (
        "one-replica",
        "a mesh of two axes with one replica",
        lambda c: c.axes.has("replicate") and c.axes.size("replicate") == 1,
    ),
    (
        "one-shard",
        "a mesh of two axes with one rank on the shard axis",
        lambda c: c.axes.has("replicate") and c.axes.size("shard") == 1,
    ),
    (
        "tensor-parallel",
        "layers sharded over the tp axis of a mesh (tensor parallelism)",
        lambda c: c.axes.has("tp"),
    ),
    (
        "tensor-parallel-alone",
        "layers sharded over all ranks, and one rank on the shard axis",
        lambda c: c.axes.has("tp") and c.axes.size("shard") == 1,
    ),
    (
        "dims-below-world",
        "a parameter with a first dim smaller than the world",
        lambda c: any(length < c.axes.parts("parameters") for length in _lengths(c)),
    ),
    (
        "uneven",
        "a parameter whose first dim the world does not divide",
        lambda c: any(length % c.axes.parts("parameters") for length in _lengths(c)),
    ),
    ("uneven-total", "the world does not divide the number of elements", _uneven_total),
    ("hosts", "several hosts", lambda c: len(_on_hosts(c)) > 1),
    (
        "hosts-uneven",
        "hosts with different numbers of ranks",
        lambda c: len(set(_on_hosts(c))) > 1,
    ),
    dimension="world",
)

OF_AXIS: Mapping[AxisName, tuple[str, ...]] = {
    "replicate": ("two-axes", "one-replica", "one-shard", "sync-shards"),
    "tp": ("tensor-parallel", "tensor-parallel-alone"),
}
"""Features that only a mesh with the axis has, the plainest first."""
