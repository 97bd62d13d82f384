"""Which cases a run has, in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from ..case.drawing import draw
from ..case.features import features
from ..case.schema import Case
from ..drive.observation import Described
from ..errors import UsageError
from ..judge.verdict import Obligation
from .options import RunOptions

NEEDED: dict[Obligation, str] = {"clip": "clip", "buffers": "block-batch-norm"}
"""The feature that a case must have to exercise an obligation, where not every case does."""

OVERDRAW = 60
"""How many cases are drawn for one with the features asked for, at most."""


@dataclass(frozen=True)
class Planned:
    """A case to run on an implementation."""

    implementation: str
    case: Case


def plan(options: RunOptions, described: Mapping[str, Described]) -> list[Planned]:
    """All cases of a run, the same for the same options.

    Implementations and world sizes take turns, so that the first minute says something of all of
    them. Raises UsageError if no case has the features asked for.
    """
    queues = [
        [Planned(name, case) for case in _cases(options, name, described[name])]
        for name in options.implementations
    ]
    return [planned for turn in zip_longest(*queues) for planned in turn if planned is not None]


def _cases(options: RunOptions, name: str, described: Described) -> Iterator[Case]:
    sizes = options.world_sizes
    fixed: dict[str, object] = dict(described.fixed)
    if not described.restores:
        fixed["start"] = {**_mapping(fixed.get("start")), "step": 0, "moments": "zero"}
    counts = [options.cases // len(sizes)] * len(sizes)
    for position in range(options.cases - sum(counts)):
        counts[position] += 1
    queues = [
        _with_features(options, size, count, fixed)
        for size, count in zip(sizes, counts, strict=True)
        if count
    ]
    found = [case for turn in zip_longest(*queues) for case in turn if case is not None]
    _complete(found, options, fixed)
    if not found:
        wanted = ", ".join(options.features)
        raise UsageError(f"no case for {name} has the features asked for: {wanted}")
    return iter(found)


def _complete(found: list[Case], options: RunOptions, fixed: Mapping[str, object]) -> None:
    """Put a case in for every obligation that none of a few cases would exercise.

    They take the place of the last cases, for want of which nothing goes unchecked.
    """
    place = len(found)
    for obligation, feature in NEEDED.items():
        if obligation not in options.obligations or place == 0:
            continue
        if any(feature in features(case) for case in found):
            continue
        seed = options.seed * 10_007 + 1_000_003
        drawn = draw(OVERDRAW, seed=seed, world_sizes=options.world_sizes, fixed=fixed)
        wanted = {feature, *options.features}
        fitting = [case for case in drawn if wanted <= set(features(case))]
        if fitting:
            place -= 1
            found[place] = fitting[0]


def _with_features(
    options: RunOptions, size: int, count: int, fixed: Mapping[str, object]
) -> list[Case]:
    wanted = set(options.features)
    # One seed per world size: adding a world size does not change the cases of the others.
    seed = options.seed * 10_007 + size
    if not wanted:
        return draw(count, seed=seed, world_sizes=(size,), fixed=fixed)
    drawn = draw(count * OVERDRAW, seed=seed, world_sizes=(size,), fixed=fixed)
    return [case for case in drawn if wanted <= set(features(case))][:count]


def _mapping(value: object) -> dict[str, object]:
    return dict(value) if isinstance(value, Mapping) else {}
