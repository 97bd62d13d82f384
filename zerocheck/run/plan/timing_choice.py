"""Choice of the cases to time: few, since each takes its steps once more."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from .plan import PlannedCase

EVERY = 32
"""One case of so many, of each implementation. To time a case took 1.7 times the processor time of
running and judging it, over 16 cases of three implementations: that is 5 % of a run."""


class TimingChoice:
    """Choice of cases to time as they come, from the world size with the fewest timed ones.

    world_sizes: of the run.
    """

    def __init__(self, world_sizes: Sequence[int]) -> None:
        self._sizes = tuple(world_sizes)
        self._counts: Counter[str] = Counter()
        self._timed: dict[str, Counter[int]] = defaultdict(Counter)
        self._chosen: set[PlannedCase] = set()

    def next(self, item: PlannedCase) -> bool:
        """Return True if this case, the next of its implementation, is timed.

        The first one of several ranks is, as far as the run has several.
        """
        name, size = item.implementation, item.case.world_size
        timed = self._timed[name]
        due = timed.total() <= self._counts[name] // EVERY
        self._counts[name] += 1
        several = [one for one in self._sizes if one > 1] or list(self._sizes)
        if not due or size not in several or timed[size] > min(timed[one] for one in several):
            return False
        timed[size] += 1
        self._chosen.add(item)
        return True

    def failed(self, item: PlannedCase) -> None:
        """Discard a case without timings, so that another one is timed in its place."""
        if item in self._chosen:
            self._chosen.discard(item)
            self._timed[item.implementation][item.case.world_size] -= 1
