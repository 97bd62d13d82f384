"""What a sharder holds for a while within a step, on top of what one device needs for the model.

The rules of a sharder say when something begins to be held and when it is let go of; the passage
through the bare model says what the model itself allocates in between. Their sum is known at every
instant, and what is kept of it is the most in each phase.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ...case.schema import Case
from ...case.shapes import sometimes_used
from ...compat_memory import Allocation
from ...contract.layout import ALLOCATED, Category, Highest, Phase, Term, works

WORKING: tuple[Term, ...] = ("working", "gathering", "reducing")


def terms_of(case: Case, *, adds: bool = False) -> tuple[Term, ...]:
    """What can be told of: where the data say which parameters are used, they say which buckets
    are full when, and only what is gathered does not depend on that.

    What the model itself holds is not known of the user's own, whose operators may depend on the
    data; nor of transposed parameters in bf16, which kernels repack or not by how they lie in
    memory, and a flat buffer may hold them otherwise. adds: new gradients are added to those that
    are there, for a moment beside them, which is not told.
    """
    if sometimes_used(case.model):
        return ("gathered",)
    repacked = any(block.transposed and block.dtype == "bf16" for block in case.model.blocks)
    if case.model.user is not None or repacked or adds:
        return ("gathered", "bucket")
    return ("gathered", "bucket", *WORKING)


class Own(NamedTuple):
    """What the model itself holds between two events, in bytes from before its forward on.

    most: right after an allocation, None if there was none; end: when the second event comes.
    """

    most: int | None
    end: int


NOTHING = Own(None, 0)


def owned(happened: Iterable[str | Allocation]) -> Iterator[Own]:
    """From what the allocator did, with a mark for each event. What was there before is not
    counted."""
    alive: dict[int, int] = {}
    held = 0
    most: int | None = None
    for one in happened:
        if isinstance(one, str):
            yield Own(most, held)
            most = None
        elif one.bytes > 0:
            if not works("other", one.bytes):
                continue
            alive[one.address] = one.bytes
            held += one.bytes
            most = held if most is None else max(most, held)
        else:
            held -= alive.pop(one.address, 0)


class Window:
    """What is held now, and the most of it in each phase of each step."""

    def __init__(self) -> None:
        self._held: dict[tuple[Category, Hashable], int] = {}
        self._sums: Counter[Category] = Counter()
        self._own = 0
        self._at: tuple[int, Phase] = (-1, "built")
        self._highest: dict[tuple[int, Phase], Counter[Term]] = {}

    def at(self, step: int, phase: Phase) -> None:
        """A phase begins."""
        self._at = step, phase
        self._instant()

    def hold(self, category: Category, key: Hashable, size: int) -> None:
        """So many bytes are allocated, unless they are held already."""
        if (category, key) not in self._held and works(category, size):
            self._held[category, key] = size
            self._sums[category] += size
            self._instant(ALLOCATED.get(category))

    def free(self, category: Category, key: Hashable) -> None:
        """They are given back, if they are held."""
        self._sums[category] -= self._held.pop((category, key), 0)

    def becomes(self, category: Category, key: Hashable, other: Category) -> None:
        """They are of another category from now on."""
        size = self._held.pop((category, key), 0)
        self._sums[category] -= size
        self._held[other, key] = size
        self._sums[other] += size

    def keys(self, category: Category) -> Sequence[Hashable]:
        """Of what is held of a category."""
        return [key for kind, key in self._held if kind == category]

    def own(self, own: Own) -> None:
        """The model computes, until the next event."""
        if own.most is not None:
            self._own = own.most
            self._instant()
        self._own = own.end

    def gradient(self, name: str, size: int) -> None:
        """What the model has computed is a gradient, which somebody else is to let go of."""
        if not works("other", size):
            return
        self._own -= size
        if ("other", name) not in self._held:  # else it was added to that
            self._held["other", name] = size
            self._sums["other"] += size

    def added(self, size: int) -> None:
        """What the model has computed is a gradient, which is added to another and is gone."""
        if works("other", size):
            self._own -= size

    def highest(self, terms: Collection[Term]) -> tuple[Highest, ...]:
        """The most of each of some terms in each phase; of the step's last one, in which the
        optimizer computes, of what is gathered only."""
        return tuple(
            Highest(phase, step, term, self._highest[step, phase][term])
            for step, phase in self._highest
            if phase != "built"
            for term in terms
            if phase != "step" or term == "gathered"
        )

    def _instant(self, *others: Term | None) -> None:
        terms = self._highest.setdefault(self._at, Counter())
        for category, size in self._sums.items():
            terms[category] = max(terms[category], size)
        for term in ("working", *others):
            if term is not None:
                terms[term] = max(terms[term], self._sums.total() + self._own)
