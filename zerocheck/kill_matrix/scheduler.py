"""Concurrent searches on one pool of ranks. Each asks for a few cases at a time.

While the answer to one is worked out here, the ranks run what the others asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from ..case.schema import Case
from ..protocol.verdicts import OBLIGATIONS
from ..run.execute.outcome import Results
from ..run.execute.rank_pool import RankPool
from ..run.execute.trial import Trial

AHEAD = 16
"""Searches under way at once. Two cores are busy with 3. More are there since ranks of one number
are one team, whose cases wait for each other; since a case that hangs waits for seconds; and since
several runs that share a machine have it in turns."""

A = TypeVar("A")


class TrialRequest(NamedTuple):
    """Request to run a case.

    traced: in fresh rank processes that record their collectives, as a run confirms a crash or
    hang; measured: once more, for the obligations of MEMORY.
    """

    implementation: str
    case: Case
    traced: bool = False
    measured: bool = False


Search = Generator[tuple[TrialRequest, ...], tuple[A, ...], None]
Answer = Callable[[TrialRequest, Results], A]


def run_searches(
    ranks: RankPool, searches: Iterable[Search[A]], answer: Answer[A], *, ahead: int = AHEAD
) -> None:
    """Run all searches to their end, `ahead` of them at a time.

    A search yields what it asks for, and is sent the answers in the same order. answer(ask,
    result): one of them; it must release the result. A request of several searches is run once.
    Raises whatever a search or `answer` raises.
    """
    _JointHunt(ranks, searches, answer, ahead).run()


@dataclass(eq=False)
class _Waiting(Generic[A]):
    """Search that waits: its last request, and the number of answers that are missing."""

    search: Search[A]
    asks: tuple[TrialRequest, ...]
    left: int


class _JointHunt(Generic[A]):
    def __init__(
        self, ranks: RankPool, searches: Iterable[Search[A]], answer: Answer[A], ahead: int
    ) -> None:
        self.ranks = ranks
        self.searches = iter(searches)
        self.answer = answer
        self.ahead = ahead
        self.open = 0
        self.in_flight: deque[tuple[TrialRequest, Trial]] = deque()
        self.asked: dict[TrialRequest, list[_Waiting[A]]] = {}
        self.known: dict[TrialRequest, A] = {}

    def run(self) -> None:
        """Run until no search is left."""
        self._fill()
        while self.in_flight:
            ask, trial = self._next()
            self.known[ask] = self.answer(ask, trial.result())
            for waiting in self.asked.pop(ask):
                waiting.left -= 1
                if not waiting.left:
                    answers = tuple(self.known[one] for one in waiting.asks)
                    self._go_on(waiting.search, answers)
            self._fill()

    def _next(self) -> tuple[TrialRequest, Trial]:
        """Take the first trial that is done, else the oldest one."""
        place = next((i for i, (_, trial) in enumerate(self.in_flight) if trial.done), 0)
        self.in_flight.rotate(-place)
        first = self.in_flight.popleft()
        self.in_flight.rotate(place)
        return first

    def _fill(self) -> None:
        while self.open < self.ahead:
            search = next(self.searches, None)
            if search is None:
                return
            self.open += 1
            self._go_on(search, None)

    def _go_on(self, search: Search[A], answers: tuple[A, ...] | None) -> None:
        """Continue a search until it asks for an unknown answer, or ends."""
        try:
            while True:
                asks = next(search) if answers is None else search.send(answers)
                unknown = dict.fromkeys(ask for ask in asks if ask not in self.known)
                if unknown:
                    break
                answers = tuple(self.known[ask] for ask in asks)
        except StopIteration:
            self.open -= 1
            return
        waiting = _Waiting(search, asks, len(unknown))
        for ask in unknown:
            if ask not in self.asked:
                trial = Trial(
                    self.ranks,
                    ask.implementation,
                    ask.case,
                    fresh=ask.traced,
                    trace=ask.traced,
                    obligations=OBLIGATIONS if ask.measured else None,
                )
                self.in_flight.append((ask, trial))
            self.asked.setdefault(ask, []).append(waiting)
