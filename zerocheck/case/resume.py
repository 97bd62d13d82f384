"""Resumed cases: a drawn case with checkpoints and the ranks that load them."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any, Literal, TypeVar

import msgspec

from .drawing import draw
from .features import features
from .fitting import fit_axes
from .schema import Case, DamageKind, MeshSizes, TrainingSegment
from .values import CHECKPOINTS

T = TypeVar("T")

DAMAGES: tuple[DamageKind, ...] = ("flip", "mix", "truncate", "mix", "remove", "flip")
"""Kinds of damage in turns. What is noticed least is tried most."""

Harm = Literal["killed", "damaged"]
_TURNS: tuple[Harm | None, ...] = (None, None, None, "damaged", None, None, "killed", "damaged")
"""Harm to the last checkpoint of each case, in turns; None: it is loaded, and training goes on."""

OVERDRAW = 100
"""Cases drawn for one with the features asked for, at most."""

OFFERED = 4
"""Cases drawn for each that is taken: the one with the most features that few had before."""

ENOUGH = 3
"""Cases after which a feature is none that few had."""


def draw_resumed(
    count: int,
    *,
    seed: int,
    world_sizes: Sequence[int],
    fixed: Mapping[str, Any] | None = None,
    into: Sequence[str] = (),
    having: Collection[str] = (),
    harms: Sequence[Harm] = (),
    replicates: bool = False,
) -> list[Case]:
    """Draw up to `count` distinct cases with a checkpoint or more; the same for equal arguments.

    The pairs of world sizes to save and to load: see `_pairs`. fixed: as in `drawing.draw`;
    into: implementations that can load what is saved, beside the one that saved; having: features
    that each must have; harms: what each ends with, in turns; by default few do; replicates: one
    case of three has a replicate axis, with several ranks on both axes, where a world size can be
    split so.
    Fewer than `count` if there are no more.
    """
    source = random.Random(seed)  # only random() is used: its sequence is promised to stay
    axes = random.Random(seed)  # of its own, so that all else is drawn as without replicas
    tries = count * (OVERDRAW // OFFERED if having else 1)
    pairs = _pairs(tries, list(dict.fromkeys(world_sizes)), source)
    fixed = _without_unfreezing(fixed or {})
    bases = {
        size: draw(share * OFFERED, seed=seed * 10_007 + size, world_sizes=(size,), fixed=fixed)
        for size, share in Counter(saving for saving, _ in pairs).items()
    }
    harms = harms or [harm for harm, names in _FEATURES.items() if not names.isdisjoint(having)]
    wanted = set(having)
    counts: Counter[str] = Counter()
    found: dict[Case, None] = {}
    damaged = 0
    for number, (saving, loading) in enumerate(pairs):
        if len(found) == count:
            break
        harm = _harm(number, harms)
        damage = DAMAGES[damaged % len(DAMAGES)]
        damaged += harm == "damaged"
        offered = {}
        for base in bases[saving][:OFFERED]:
            segments = _drawn_segments(loading, world_sizes, into, harm, damage, source)
            case = _resumed(base, segments, fixed, source)
            if replicates and number % 3 == 2:
                case = _replicated(case, axes)
            case = fit_axes(case)
            has = features(case)
            if wanted <= set(has) and case not in found:
                offered[case] = [name for name in has if name not in UNCOUNTED]
        del bases[saving][:OFFERED]
        if offered:
            best = max(
                offered, key=lambda case: sum(counts[name] < ENOUGH for name in offered[case])
            )
            found[best] = None
            counts.update(offered[best])
    return list(found)


def _resumed(
    base: Case,
    segments: tuple[TrainingSegment, ...],
    fixed: Mapping[str, Any],
    source: random.Random,
) -> Case:
    kind = _pick(CHECKPOINTS, source)
    sharding = base.sharding
    if "checkpoint" not in fixed.get("sharding", {}):
        sharding = msgspec.structs.replace(sharding, checkpoint=kind)
    return msgspec.structs.replace(base, resume=segments, sharding=sharding)


def _replicated(case: Case, source: random.Random) -> Case:
    """Give the meshes a replicate axis, half of the time for each segment."""
    meshes = [
        _mesh(mesh, source) for mesh in (case.mesh, *(segment.mesh for segment in case.resume))
    ]
    segments = [
        msgspec.structs.replace(segment, mesh=mesh)
        for segment, mesh in zip(case.resume, meshes[1:], strict=True)
    ]
    return msgspec.structs.replace(case, mesh=meshes[0], resume=tuple(segments))


def _mesh(mesh: MeshSizes, source: random.Random) -> MeshSizes:
    size = math.prod(mesh)
    splits = [(size // shards, shards) for shards in range(2, size) if size % shards == 0]
    return _pick(splits, source) if splits and source.random() < 0.5 else mesh


def _pairs(count: int, sizes: Sequence[int], source: random.Random) -> list[tuple[int, int]]:
    """Return `count` pairs of world sizes to save and to load.

    First every size saves once and loads once. Then the pairs come by chance, (N, M) in proportion
    to 1 / (N M): few ranks are quick, and show most. None again before all have had their turn.
    """
    first = list(zip(_shuffled(sizes, source), _shuffled(sizes, source), strict=True))
    found = list(first)
    while len(found) < count:
        every = list(product(sizes, sizes))
        # Of one size there is one pair, which has had its turn.
        left = [p for p in every if len(found) > len(first) or p not in first] or every
        # The least of exponentially distributed times: drawn by weight, without replacement.
        keyed = [(-math.log(1 - source.random()) * math.prod(p), n, p) for n, p in enumerate(left)]
        found += [pair for _, _, pair in sorted(keyed)]
    return found[:count]


UNCOUNTED = frozenset(("export-offload", "without-device-mesh"))
"""Features drawn by the seed alone: which case is taken does not depend on them."""

_FEATURES: dict[Harm, frozenset[str]] = {
    "killed": frozenset(("resume-killed",)),
    "damaged": frozenset(f"resume-{kind}" for kind in DAMAGES),
}


def _harm(number: int, harms: Sequence[Harm]) -> Harm | None:
    if harms:
        return harms[number % len(harms)]
    return _TURNS[number % len(_TURNS)]


def _drawn_segments(
    loading: int,
    world_sizes: Sequence[int],
    into: Sequence[str],
    harm: Harm | None,
    damage: DamageKind,
    source: random.Random,
) -> tuple[TrainingSegment, ...]:
    sizes = [loading]
    if source.random() < 0.25:
        sizes.append(_pick(world_sizes, source))
    segments = [
        TrainingSegment(
            mesh=(size,),
            steps=1 + int(source.random() * 2),
            into=_pick(into, source) if into and source.random() < 0.4 else "",
            over=source.random() < 0.4,
            background=source.random() < 0.25,
        )
        for size in sizes
    ]
    if harm == "killed":
        segments[-1] = msgspec.structs.replace(segments[-1], killed=round(source.random(), 3))
    elif harm == "damaged":
        segments[-1] = msgspec.structs.replace(segments[-1], damage=damage)
    return tuple(segments)


def _without_unfreezing(fixed: Mapping[str, Any]) -> dict[str, Any]:
    training = fixed.get("training")
    given = dict(training) if isinstance(training, Mapping) else {}
    return {**fixed, "training": {**given, "unfreeze": None}}


def _shuffled(items: Sequence[T], source: random.Random) -> list[T]:
    return [item for _, _, item in sorted((source.random(), n, i) for n, i in enumerate(items))]


def _pick(items: Sequence[T], source: random.Random) -> T:
    return items[int(source.random() * len(items))]
