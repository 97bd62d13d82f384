"""Covering array of one implementation: the cases it needs, and replacements for those in vain.

Cases that an implementation rejects up front are known before anything runs. A case may still be
refused while it is built; then other cases are to provide its pairs.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from copy import copy

from ...case.covering import Pairs, cost, cover
from ...case.schema import Case
from ..records.records import Coverage, RefusedPairs

TRIES = 3
"""Cases run in vain, until what they have in common counts as the reason."""


class Array:
    """Covering array: cases that together have every pair that the implementation supports.

    held: candidates and the pairs of each; reasons: of each, why it is refused, or None; ignored:
    features that it ignores, whose pairs do not count.
    """

    def __init__(
        self,
        pairs: Pairs,
        held: dict[Case, int],
        reasons: Sequence[str | None],
        ignored: Sequence[str],
    ) -> None:
        counting = pairs.without(ignored)
        self._pairs = pairs
        self._ignored = ignored
        self._held = {
            case: some & counting
            for (case, some), reason in zip(held.items(), reasons, strict=True)
            if reason is None
        }
        self.supported = 0
        for some in self._held.values():
            self.supported |= some
        self.refused = _by_reason(
            [some & counting & ~self.supported for some in held.values()], reasons
        )
        costs = [cost(case) for case in self._held]
        chosen = cover(list(self._held.values()), costs, self.supported)
        candidates = list(self._held)
        self.cases = [candidates[place] for place in chosen]
        """The cases to run, those that bring most first."""
        self._judged = 0
        self._in_vain: list[int] = []
        self._done: set[Case] = set()

    def restarted(self) -> Array:
        """Return a copy without notes, for an implementation with equal reasons and features."""
        other = copy(self)
        other._judged = 0
        other._in_vain = []
        other._done = set()
        return other

    def coverage(self, implementation: str, *, max_cases: int | None, model: str) -> Coverage:
        """Return the coverage that is wanted of a run, for the journal."""
        return Coverage(
            implementation=implementation,
            features=self._pairs.names,
            ignored=tuple(self._ignored),
            supported=f"{self.supported:x}" if self.supported else "",
            refused=tuple(
                RefusedPairs(reason=reason, pairs=f"{pairs:x}")
                for reason, pairs in self.refused.items()
            ),
            max_cases=max_cases,
            model=model,
        )

    def note(self, case: Case, *, refused: bool, idle: Collection[str] = ()) -> None:
        """Note a case that was judged, or refused while it was built.

        idle: features that it had and did not exercise; for their pairs it was run in vain.
        """
        self._done.add(case)
        pairs = self._pairs.of(case)
        exercised = 0 if refused else pairs & self._pairs.without(idle)
        self._judged |= exercised
        if pairs & ~exercised:
            self._in_vain.append(pairs & ~exercised)

    def more(self) -> list[Case]:
        """Return cases for pairs that occurred in vain only, if others may exercise them.

        It ends: a pair that is refused again and again becomes a culprit.
        """
        lost = 0
        for some in self._in_vain:
            lost |= some
        lost &= self.supported & ~self._judged
        if not lost:
            return []
        culprits = self._culprits()
        candidates = [
            case
            for case, some in self._held.items()
            if case not in self._done and not some & culprits
        ]
        held = [self._held[case] for case in candidates]
        # What was refused and never judged may be why: the less of it in a case the better.
        costs = [
            cost(case) * (1 + (some & lost).bit_count())
            for case, some in zip(candidates, held, strict=True)
        ]
        return [candidates[place] for place in cover(held, costs, lost)]

    def _culprits(self) -> int:
        """Return the pairs that explain why cases were run in vain.

        They are of a feature, or themselves, in vain in TRIES cases and exercised in none.
        """
        found = 0
        for name in self._pairs.names:
            pairs = self._pairs.with_feature(name)
            tries = sum(bool(some & pairs) for some in self._in_vain)
            if tries >= TRIES and not self._judged & pairs:
                found |= pairs
        tried = [0] * TRIES  # the pairs that were in vain at least once, twice, ...
        for some in self._in_vain:
            if not some & found:
                for number, before in enumerate(tried):
                    tried[number], some = before | some, before & some
        return found | (tried[-1] & ~self._judged)


def _by_reason(refused: Sequence[int], reasons: Sequence[str | None]) -> dict[str, int]:
    """Return the refused pairs by reason, each under the one that fits it best.

    That is the reason given in many candidates that have the pair, and in few others.
    """
    given_at_all = Counter(reason for reason in reasons if reason is not None)
    all_refused = given_at_all.total()
    reason_counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for pairs, given in zip(refused, reasons, strict=True):
        while pairs and given is not None:
            lowest = pairs & -pairs
            reason_counts[lowest][given] += 1
            pairs ^= lowest
    by_reason: dict[str, int] = {}
    for pair, counts in reason_counts.items():
        having = counts.total()
        likelihoods = {  # log likelihood ratio: how much the pair says of the reason
            name: count * math.log((count / having) / (given_at_all[name] / all_refused))
            for name, count in counts.items()
        }
        reason = max(likelihoods, key=likelihoods.__getitem__)
        by_reason[reason] = by_reason.get(reason, 0) | pair
    return by_reason
