"""Features of the ranks: their number, their hosts, and the divisibility of sizes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ...machine.hosts import counts
from ..mesh import AxisName
from ..schema import Case
from ..shapes import parameter_shapes, trainable
from ..tensor_parallel import plan_of, sharded_dim
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


def _sharded_twice(case: Case) -> bool:
    """Return True if a first dim is split over tp, and its parts over ranks of the shard axis.

    DTensor has the shards in another order then than one axis of as many ranks would.
    """
    if not case.axes.has("tp") or case.axes.size("shard") == 1:
        return False
    plan = plan_of(case.model, case.axes.size("tp"))
    ranks = case.axes.size("tp") * case.axes.size("shard")
    shapes = parameter_shapes(case.model)
    return any(
        shape and shape[0] % ranks == 0 and sharded_dim(plan, name) == 0
        for name, shape in shapes.items()
    )


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
        "tensor-parallel-strided",
        "rows of a parameter sharded over the tp axis and over the shard axis, evenly",
        _sharded_twice,
    ),
    *(
        (name, words, lambda c, axis=axis: c.axes.has(axis))
        for axis, name, words in (
            ("cp", "context-parallel", "sequences split over the cp axis of a mesh"),
            ("ep", "expert-parallel", "experts on the ranks of the ep axis of a mesh"),
            ("pp", "pipeline-parallel", "layers on the ranks of the pp axis of a mesh"),
        )
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
    ("hosts-uneven", "hosts with different numbers of ranks", lambda c: len(set(_on_hosts(c))) > 1),
    dimension="world",
)

OF_AXIS: Mapping[AxisName, tuple[str, ...]] = {
    "replicate": ("two-axes", "one-replica", "one-shard", "sync-shards"),
    "tp": ("tensor-parallel", "tensor-parallel-alone", "tensor-parallel-strided"),
    "cp": ("context-parallel",),
    "ep": ("expert-parallel",),
    "pp": ("pipeline-parallel",),
}
"""Features that only a mesh with the axis has, the plainest first."""
