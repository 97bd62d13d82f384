"""Resumed cases: a drawn case with checkpoints and the ranks that load them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any, TypeVar

import msgspec

from .drawing import draw
from .features import features
from .schema import Case, DamageKind, Leg
from .values import CHECKPOINTS

T = TypeVar("T")

DAMAGES: tuple[DamageKind, ...] = ("flip", "flip", "truncate", "remove", "mix")

OVERDRAW = 60
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
) -> list[Case]:
    """At most `count` distinct cases with at least one checkpoint, the same for the same arguments.

    All pairs of world sizes to save and to load take turns, in an order that the seed decides.
    fixed: as in `strategies.cases`; into: implementations that can load what is saved, beside the
    one that saved; having: features that each must have. Fewer than `count` if there are no more.
    """
    source = random.Random(seed)  # only random() is used: its sequence is promised to stay
    pairs = _shuffled(list(product(world_sizes, repeat=2)), source)
    tries = count * (OVERDRAW // OFFERED if having else 1)
    fixed = _without_unfreezing(fixed or {})
    bases: dict[int, list[Case]] = {}
    for size in dict.fromkeys(world_sizes):
        share = -(-tries // len(pairs)) * len(world_sizes) * OFFERED
        bases[size] = draw(share, seed=seed * 10_007 + size, world_sizes=(size,), fixed=fixed)
    wanted = set(having)
    seen: Counter[str] = Counter()
    found: dict[Case, None] = {}
    for number in range(tries):
        if len(found) == count:
            break
        saving, loading = pairs[number % len(pairs)]
        offered = {}
        for base in bases[saving][:OFFERED]:
            case = _resumed(base, _legs(loading, world_sizes, into, source), fixed, source)
            has = features(case)
            if wanted <= set(has) and case not in found:
                offered[case] = has
        del bases[saving][:OFFERED]
        if offered:
            best = max(offered, key=lambda case: sum(seen[name] < ENOUGH for name in offered[case]))
            found[best] = None
            seen.update(offered[best])
    return list(found)


def _resumed(
    base: Case, legs: tuple[Leg, ...], fixed: Mapping[str, Any], source: random.Random
) -> Case:
    kind = _pick(CHECKPOINTS, source)
    sharding = base.sharding
    if "checkpoint" not in fixed.get("sharding", {}):
        sharding = msgspec.structs.replace(sharding, checkpoint=kind)
    return msgspec.structs.replace(base, resume=legs, sharding=sharding)


def _legs(
    loading: int, world_sizes: Sequence[int], into: Sequence[str], source: random.Random
) -> tuple[Leg, ...]:
    sizes = [loading]
    if source.random() < 0.25:
        sizes.append(_pick(world_sizes, source))
    legs = [
        Leg(
            mesh=(size,),
            steps=1 + int(source.random() * 2),
            into=_pick(into, source) if into and source.random() < 0.4 else "",
            over=source.random() < 0.4,
            background=source.random() < 0.25,
        )
        for size in sizes
    ]
    chance = source.random()
    if chance < 0.15:
        legs[-1] = msgspec.structs.replace(legs[-1], killed=round(source.random(), 3))
    elif chance < 0.3:
        legs[-1] = msgspec.structs.replace(legs[-1], damage=_pick(DAMAGES, source))
    return tuple(legs)


def _without_unfreezing(fixed: Mapping[str, Any]) -> dict[str, Any]:
    training = fixed.get("training")
    given = dict(training) if isinstance(training, Mapping) else {}
    return {**fixed, "training": {**given, "unfreeze": None}}


def _shuffled(items: list[T], source: random.Random) -> list[T]:
    return [item for _, _, item in sorted((source.random(), n, i) for n, i in enumerate(items))]


def _pick(items: Sequence[T], source: random.Random) -> T:
    return items[int(source.random() * len(items))]
