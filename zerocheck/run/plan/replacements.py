"""Further cases of a random run for features that its cases had, and could break nothing by.

The one case with a single rank on the shard axis may start with norms of 0, so that no gradient
flows; then it says nothing of that mesh. A covering array replaces such cases by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from ...case.features import OF_STEPS, features
from ...case.schema import Case
from .covering_array import TRIES
from .streams import Asking

OFFERED = 240
"""Cases drawn to choose from."""


class Replacements:
    """Source of cases for features that were exercised by none of the cases that had them."""

    def __init__(self, draw_some: Callable[[int], list[Case]], ask: Asking) -> None:
        """Draw nothing yet.

        draw_some(n): n cases, others than those of the run; ask: reasons why cases are refused.
        """
        self._draw = draw_some
        self._ask = ask
        self._offered: list[Case] | None = None
        self._exercised: set[str] = set()
        self._idle: set[str] = set()
        self._given: Counter[str] = Counter()
        self._done: set[Case] = set()

    def note(self, case: Case, *, idle: Collection[str]) -> None:
        """Note a case that was judged, and the features that it had and did not exercise."""
        self._done.add(case)
        had = set(features(case)).intersection(OF_STEPS)
        self._exercised |= had.difference(idle)
        self._idle |= had.intersection(idle)

    def more(self) -> list[Case]:
        """Return cases with the features that are still to be exercised.

        It ends: a feature is given up after TRIES of them.
        """
        wanted = [
            name
            for name in OF_STEPS
            if name in self._idle - self._exercised and self._given[name] < TRIES
        ]
        taken: dict[Case, None] = {}
        while wanted:
            best = self._best(wanted, but=self._done.union(taken))
            if best is None:
                self._given.update(dict.fromkeys(wanted, TRIES))
                break
            taken[best] = None
            self._given.update(names := set(wanted).intersection(features(best)))
            wanted = [name for name in wanted if name not in names]
        return list(taken)

    def _best(self, wanted: Sequence[str], but: Collection[Case]) -> Case | None:
        """Return the case with most of the features, among these the one with the fewest others.

        A case of few features is the least likely to be idle.
        """
        counts = {
            case: (len(has.intersection(wanted)), -len(has))
            for case in self._candidates()
            if case not in but and (has := set(features(case))).intersection(wanted)
        }
        return max(counts, key=counts.__getitem__, default=None)

    def _candidates(self) -> list[Case]:
        if self._offered is None:
            drawn = self._draw(OFFERED)
            reasons = self._ask(drawn)
            self._offered = [
                case for case, reason in zip(drawn, reasons, strict=True) if reason is None
            ]
        return self._offered
