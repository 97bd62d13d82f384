"""Covering arrays: few cases in which every pair of features occurs.

Most bugs need one option or two together, seldom three (Kuhn, Wallace and Gallo, IEEE TSE 30(6),
2004), so all pairs are worth having, and a few dozen cases hold thousands of them. Nobody has to
write down which features go together: candidates are drawn, and a pair that some candidate has is
possible. Candidates are drawn until new ones bring no new pair.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from .drawing import CaseMaker
from .features import FEATURES
from .schema import Case, MeshSizes
from .shapes import call_order

ALONE = "world-1"
"""One rank shards nothing and reduces nothing, so its cases count for the pairs with this only."""

LEAST, MOST = 4_000, 40_000
"""Candidates drawn at least, for a short array, and at most."""

QUIET = 2_000
"""So many candidates in a row without a new pair end the drawing."""

TILT = 0.15
"""Exponent that pushes a choice to the end of its options, where the unusual ones stand."""

FIXED_COST = 11
"""Cost of a case without its layers, in layers. Measured on 2 cores over 5,200 cases of all
built-in implementations, by least squares: 0.1 s, and 9 ms for each layer that a rank goes through.
"""


class Pairs:
    """Pairs of features as the bits of one integer: bit i * n + j for features i < j of n.

    names: the features that count, in a fixed order.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._bits = {name: 1 << place for place, name in enumerate(self.names)}
        known = [FEATURES.get(name) for name in self.names]  # a journal may be of another version
        self._present = [None if feature is None else feature.present for feature in known]

    def of(self, case: Case) -> int:
        """Return a case's pairs; for one rank only those with the world size: ALONE."""
        present = 0
        for place, has in enumerate(self._present):
            if has is not None and has(case):
                present |= 1 << place
        pairs = self._among(present)
        alone = self._bits.get(ALONE, 0)
        return pairs & self.with_feature(ALONE) if present & alone else pairs

    def with_feature(self, name: str) -> int:
        """Return all pairs that include the feature, possible or not."""
        place, count = self.names.index(name), len(self.names)
        later = ((1 << count) - (2 << place)) << place * count
        return later | sum(1 << (i * count + place) for i in range(place))

    def without(self, names: Iterable[str]) -> int:
        """Return all pairs, possible or not, that have none of these features."""
        left = set(self.names) - set(names)
        return self._among(sum(self._bits[name] for name in left))

    def named(self, pairs: int) -> Iterator[tuple[str, str]]:
        """Return the names of each pair, in order."""
        while pairs:
            lowest = pairs & -pairs
            i, j = divmod(lowest.bit_length() - 1, len(self.names))
            yield self.names[i], self.names[j]
            pairs ^= lowest

    def _among(self, present: int) -> int:
        """Return all pairs of the features in a mask."""
        pairs, count = 0, len(self.names)
        while present:
            lowest = present & -present
            present ^= lowest  # what is left stands after it
            pairs |= present << (lowest.bit_length() - 1) * count
        return pairs


def candidates(
    pairs: Pairs,
    *,
    seed: int,
    world_sizes: Sequence[int],
    fixed: Mapping[str, Any] | None = None,
    having: Iterable[str] = (),
    meshes: Sequence[MeshSizes] = (),
) -> dict[Case, int]:
    """Return distinct valid cases, the simplest first, and the pairs of each.

    The same for the same arguments.

    having: features that each must have; fixed, meshes: as in `drawing.draw`. Raises UsageError for
    fixed fields that no case has; returns fewer, or none, where there are no more.
    """
    maker = CaseMaker(world_sizes, fixed, meshes)
    source = random.Random(seed)  # only random() is used: its sequence is promised to stay
    needed = [FEATURES[name].present for name in having]
    found: dict[Case, int] = {}
    visits = quiet = 0
    for attempt in range(MOST):
        case = maker.make(_Tilted(source).choose if attempt else lambda n: 0)
        quiet += 1
        if case is not None and case not in found and all(has(case) for has in needed):
            found[case] = held = pairs.of(case)
            if held & ~visits:
                quiet = 0
            visits |= held
        if attempt >= LEAST and quiet >= QUIET:
            break
    return found


class _Tilted:
    """Choices that prefer late options, more or less so in each case.

    Late options are the unusual ones. A case that has many unusual ones covers many rare pairs;
    where all cases had many, the usual ones would not meet.
    """

    def __init__(self, source: random.Random) -> None:
        self._random = source.random
        self._share = self._random() * self._random()

    def choose(self, n: int) -> int:
        """Choose an index below n."""
        tilted = self._random() < self._share
        drawn = self._random()
        return int((drawn**TILT if tilted else drawn) * n)


COMPILING_COST = 150
"""What compiling costs, in layers: 1 to 2 s."""


def cost(case: Case) -> int:
    """Cost of running the case: the layers run by all ranks, since these share processors.

    Stem and head count, and the last pass, as if each had a backward.
    """
    passes = (case.training.steps + 1) * case.training.microbatches
    fixed = FIXED_COST if case.training.compile == "none" else FIXED_COST + COMPILING_COST
    return fixed + case.world_size * passes * (len(call_order(case.model)) + 2)


def cover(held: Sequence[int], costs: Sequence[float], wanted: int) -> list[int]:
    """Choose candidates that together have all `wanted` pairs that any of them has.

    held: the pairs of each candidate. Greedy: always the one with the most new pairs for its
    cost, which is at most ln(pairs) + 1 times as dear as the best choice; what later ones made
    superfluous is taken out. That takes out the first ones most of all, so the rest is put in
    order again: the first bring the most for their cost, and a part of the list covers much.
    """
    chosen = _greedy(range(len(held)), held, costs, wanted)
    return _greedy(_needed(chosen, held, wanted), held, costs, wanted)


def _greedy(
    places: Iterable[int], held: Sequence[int], costs: Sequence[float], wanted: int
) -> list[int]:
    """Choose, of the candidates at these places, those that add a pair, the best first."""
    # What a candidate brings can only shrink, so one that is still best after a second look is.
    waiting = [(-(held[i] & wanted).bit_count() / costs[i], i) for i in places]
    heapify(waiting)
    chosen: list[int] = []
    left = wanted
    while left and waiting:
        _, place = heappop(waiting)
        brings = -(held[place] & left).bit_count() / costs[place]
        if not brings:
            continue
        if waiting and (brings, place) > waiting[0]:
            heappush(waiting, (brings, place))
            continue
        chosen.append(place)
        left &= ~held[place]
    return chosen


def _needed(chosen: list[int], held: Sequence[int], wanted: int) -> list[int]:
    """Drop from `chosen` the cases whose pairs all occur in others."""
    kept: list[int] = []
    before = [0]
    for place in chosen:
        before.append(before[-1] | held[place])
    after = 0
    for number in reversed(range(len(chosen))):
        pairs = held[chosen[number]]
        if pairs & wanted & ~(before[number] | after):
            kept.append(chosen[number])
            after |= pairs
    return kept[::-1]
