"""Cases of a run that are drawn, and not chosen for their pairs of features."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from ...case.drawing import draw
from ...case.features import OF_AXIS, features
from ...case.schema import Case, MeshSizes
from ...errors import UsageError
from ...protocol.verdicts import Obligation
from .options import RunOptions
from .streams import Asking


@dataclass(frozen=True)
class NeededCase:
    """Features that a case must have to exercise an obligation, where not every case does.

    without: features that it must not have; fields: values of the case that give it the features,
    where a few draws would not.
    """

    obligation: Obligation
    features: frozenset[str]
    without: frozenset[str] = frozenset()
    fields: Mapping[str, object] = field(default_factory=dict)


NEEDED = (
    NeededCase("clip", frozenset(("clip-tight",))),
    NeededCase("buffers", frozenset(("block-batch-norm",))),
    # Norms are added up over the shard axis alone, and what goes over the replicate axis must go
    # over it where that is all there is.
    NeededCase("clip", frozenset(("clip-tight", "two-axes"))),
    NeededCase("gradient", frozenset(("one-shard", "microbatches"))),
    # What one shard alone sees, ranks with other shards must learn; replicas see it too.
    NeededCase(
        "update",
        frozenset(("overflow-alone", "two-axes", "loss-scale")),
        without=frozenset(("one-shard",)),
        fields={"training.loss_scale": 2.0, "training.steps": 2, "training.overflow": 0},
    ),
    # Experts are what libraries reduce and clip in groups of their own.
    NeededCase(
        "clip",
        frozenset(("block-experts", "clip-tight")),
        without=frozenset(("world-1", "one-shard")),
        fields={"training.clip": 0.005, "training.norm": "2"},
    ),
)
"""The cases that a run of few cases must have."""

OFTEN_REFUSED = frozenset(
    (
        "parameter-0d",
        "parameter-empty",
        "transposed",
        "mixed-dtypes",
        "sometimes-used",
        "clip-inf",
        "tied",
        "flat-parameters",
        "optimizer-first",
        "static-graph",
        "offload",
        "compile",
        "tensor-parallel",
        "unfreeze",
        "loss-scale",
    )
)
"""Features that some library does not support: a case without any of them can be run."""

OVERDRAW = 60
"""How many cases are drawn for one with the features asked for, at most."""

LARGEST_DRAWN = 8
"""Ranks. Larger world sizes of a profile are left to the covering array: their cases are slow."""


@dataclass(frozen=True)
class SeparateDraws:
    """Cases that a run must try and that no covering array is sure to contain.

    They have all of these features, `count` on each world size from `least` to LARGEST_APART.
    fields: values of the case that give it the features; offered: cases that are drawn for one.
    """

    features: frozenset[str]
    fields: Mapping[str, object]
    count: int = 1
    least: int = 1
    offered: int = 8


APART = (
    # In no pair, since such cases are slow. Inductor takes a minute or more: for those who ask.
    SeparateDraws(frozenset(("compile",)), {"training.compile": "eager"}),
    SeparateDraws(frozenset(("compile-aot",)), {"training.compile": "aot_eager"}),
    SeparateDraws(frozenset(("tensor-parallel",)), {"sharding.tensor_parallel": 2}),
    SeparateDraws(
        frozenset(("tensor-parallel-strided",)), {"sharding.tensor_parallel": 2}, least=4
    ),
    # What the uses of a parameter give is added before it is reduced. Of all drawn models a
    # recurrent one has most uses, one for each position, and what they give cancels.
    SeparateDraws(
        frozenset(("block-recurrent", "reduce-narrower")),
        {
            "data.length": 4,
            "precision.compute": "fp32",
            "precision.reduce": "bf16",
            "training.microbatches": 1,
            "sharding.optimizer_first": False,
        },
        offered=40,
    ),
    # A race shows where all three meet, and then in a third of the runs (faults/races).
    SeparateDraws(
        frozenset(("delays", "microbatches", "bucket-small")),
        {"disturbance.delay": 2.0, "training.microbatches": 3, "sharding.bucket": 64},
        count=3,
        least=2,
    ),
)

LARGEST_APART = 4
"""Ranks of a case of APART."""


def at_random(
    options: RunOptions, count: int, fixed: Mapping[str, object], meshes: Sequence[MeshSizes]
) -> list[Case]:
    """Draw cases at random. World sizes take turns, and so do all meshes (R, S) together.

    More of them begin with the same ones.
    """
    if count <= 0:
        return []
    sizes = options.world_sizes
    if not options.world_sizes_given:
        sizes = tuple(size for size in sizes if size <= LARGEST_DRAWN)
        meshes = [mesh for mesh in meshes if math.prod(mesh) <= LARGEST_DRAWN]
    worlds: list[tuple[int | None, Sequence[MeshSizes]]] = []
    if not replicas_asked(options):
        worlds += [(size, ()) for size in sizes]
    if meshes and "mesh" not in fixed:
        worlds.append((None, meshes))
    counts = [count // len(worlds)] * len(worlds)
    for position in range(count - sum(counts)):
        counts[position] += 1
    queues = [
        _with_features(options, size, share, fixed, of_two)
        for (size, of_two), share in zip(worlds, counts, strict=True)
        if share
    ]
    return [case for turn in zip_longest(*queues) for case in turn if case is not None]


def apart(
    found: Iterable[Case], options: RunOptions, fixed: Mapping[str, object], ask: Asking
) -> list[Case]:
    """Return the cases of APART that can be run, without those that are in `found` already."""
    there = [(case.world_size, set(features(case))) for case in found]
    smallest = min(options.world_sizes)
    taken = []
    for one in APART:
        having = _with(fixed, one.fields)
        for size in options.world_sizes:
            if not one.least <= size <= max(smallest, LARGEST_APART):
                continue
            short = one.count - sum(its == size and one.features <= has for its, has in there)
            if short <= 0:
                continue
            seed = options.seed * 10_007 + size
            count = one.offered * one.count
            try:
                offered = draw(count, seed=seed, world_sizes=(size,), fixed=having)
            except UsageError:  # three ranks are not split in two
                continue
            offered = [case for case in offered if one.features <= set(features(case))]
            reasons = ask(offered)
            able = [case for case, reason in zip(offered, reasons, strict=True) if reason is None]
            taken += able[:short]
    return taken


def _with(fixed: Mapping[str, object], fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fixed fields, and the others where they are not fixed."""
    both = dict(fixed)
    for path, value in fields.items():
        section, _, attribute = path.partition(".")
        both[section] = {attribute: value, **mapping(both.get(section))}
    return both


def _has_fields(fixed: Mapping[str, object], fields: Mapping[str, object]) -> bool:
    """Return True if the fixed fields have these values."""
    paths = ((path.split("."), value) for path, value in fields.items())
    return all(
        mapping(fixed[section]).get(attribute) == value for (section, attribute), value in paths
    )


def complete(
    found: list[Case], options: RunOptions, fixed: Mapping[str, object], meshes: Sequence[MeshSizes]
) -> None:
    """Add a case for every row of NEEDED that none of a few cases would exercise for sure.

    A case with something that libraries refuse is not sure. They take the place of the last cases,
    for want of which nothing goes unchecked.
    """
    place = len(found)
    for one in NEEDED:
        if one.obligation not in options.obligations or place == 0:
            continue
        refused = OFTEN_REFUSED - one.features
        if any(_fits(one, names) and not names & refused for names in _features(found)):
            continue
        on_axes = not one.features.isdisjoint(OF_AXIS["replicate"])
        if on_axes and (not meshes or "mesh" in fixed):
            continue
        having = _with(fixed, one.fields)
        if not _has_fields(having, one.fields):
            continue
        seed = options.seed * 10_007 + 1_000_003
        sizes = () if on_axes else options.world_sizes
        used = meshes if on_axes else ()
        drawn = draw(OVERDRAW, seed=seed, world_sizes=sizes, fixed=having, meshes=used)
        fitting = [
            (case, names)
            for case, names in zip(drawn, _features(drawn), strict=True)
            if _fits(one, names) and names.issuperset(options.features)
        ]
        if fitting:
            place -= 1
            found[place] = min(fitting, key=lambda pair: len(pair[1] & refused))[0]


def _fits(needed: NeededCase, names: set[str]) -> bool:
    return needed.features <= names and not names & needed.without


def _features(cases: Iterable[Case]) -> list[set[str]]:
    return [set(features(case)) for case in cases]


def _with_features(
    options: RunOptions,
    size: int | None,
    count: int,
    fixed: Mapping[str, object],
    meshes: Sequence[MeshSizes],
) -> list[Case]:
    """Draw cases with the features asked for. size: None for cases of the meshes alone."""
    wanted = set(options.features)
    # One seed per world size: adding a world size does not change the cases of the others.
    seed = options.seed * 10_007 + (size or 0)
    sizes = () if size is None else (size,)
    if not wanted:
        return draw(count, seed=seed, world_sizes=sizes, fixed=fixed, meshes=meshes)
    drawn = draw(count * OVERDRAW, seed=seed, world_sizes=sizes, fixed=fixed, meshes=meshes)
    return [case for case in drawn if wanted <= set(features(case))][:count]


def replicas_asked(options: RunOptions) -> bool:
    return not {*options.features}.isdisjoint(OF_AXIS["replicate"])


def mapping(value: object) -> dict[str, object]:
    """Return a section of fixed fields, or an empty one."""
    return dict(value) if isinstance(value, Mapping) else {}
