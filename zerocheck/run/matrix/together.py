"""Many searches side by side on one pool of ranks. Each asks for one case at a time.

While the answer to one is judged here, the ranks run what the others asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Generic, NamedTuple, TypeVar

from ...case.schema import Case
from ...ranks.result import JobResult
from ..trial import Ranks, Trial

AHEAD = 16
"""Searches under way at once. Two cores are busy with 3; but ranks of one number are one team, whose
cases wait for each other, a case that hangs waits for seconds, and where several runs share the
machine each has it for two seconds at a time."""

A = TypeVar("A")


class Ask(NamedTuple):
    """A case to run. free: for what it gives when many steps are taken, not to be judged."""

    implementation: str
    case: Case
    free: bool = False


Search = Generator[Ask, A, None]
Answer = Callable[[Ask, JobResult], A]


def together(
    ranks: Ranks, searches: Iterable[Search[A]], answer: Answer[A], *, ahead: int = AHEAD
) -> None:
    """Run all searches to their end, `ahead` of them at a time.

    answer(ask, result): what the search is sent; it must release the result. What several
    searches ask for is run once. Raises whatever a search or `answer` raises.
    """
    _Together(ranks, searches, answer).run(ahead)


class _Together(Generic[A]):
    def __init__(self, ranks: Ranks, searches: Iterable[Search[A]], answer: Answer[A]) -> None:
        self.ranks = ranks
        self.searches = iter(searches)
        self.answer = answer
        self.flying: deque[tuple[Ask, Trial]] = deque()
        self.asked: dict[Ask, list[Search[A]]] = {}
        self.known: dict[Ask, A] = {}

    def run(self, ahead: int) -> None:
        """Until no search is left."""
        self._fill(ahead)
        while self.flying:
            ask, trial = self._next()
            result = trial.result()
            self._fill(ahead + len(self.asked[ask]))  # so that ranks are busy meanwhile
            told = self.known[ask] = self.answer(ask, result)
            for search in self.asked.pop(ask):
                self._go_on(search, told)
            self._fill(ahead)

    def _next(self) -> tuple[Ask, Trial]:
        """The first that has come back, else the one that left first."""
        place = next((i for i, (_, trial) in enumerate(self.flying) if trial.done), 0)
        self.flying.rotate(-place)
        first = self.flying.popleft()
        self.flying.rotate(place)
        return first

    def _fill(self, ahead: int) -> None:
        while sum(map(len, self.asked.values())) < ahead:
            search = next(self.searches, None)
            if search is None:
                return
            self._go_on(search, None)

    def _go_on(self, search: Search[A], told: A | None) -> None:
        """Until it asks for something new, or ends."""
        try:
            ask = next(search) if told is None else search.send(told)
            while ask in self.known:
                ask = search.send(self.known[ask])
        except StopIteration:
            return
        if ask not in self.asked:
            trial = Trial(self.ranks, ask.implementation, ask.case)
            self.flying.append((ask, trial))
        self.asked.setdefault(ask, []).append(search)
