"""Live memory of a sharder within a step, on top of what one device needs for the model.

The rules of a sharder say when memory is allocated and when it is freed; the trace of the bare
model gives the allocations of the model itself in between. Their sum is known at every instant, and
the maximum of each phase is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ...case.schema import Case
from ...case.shapes import sometimes_used
from ...compat_memory import Allocation
from ...protocol.layout import ALLOCATED, Category, Highest, Phase, Term, works

WORKING: tuple[Term, ...] = ("working", "gathering", "reducing")


def terms_of(case: Case, *, adds: bool = False) -> tuple[Term, ...]:
    """Return the terms of memory that can be predicted.

    Where the data determine which parameters are used, they also determine which buckets are full
    when, and only gathered parameters do not depend on that.

    The memory of the model itself is not known for a user's own, whose operators may depend on the
    data; nor for transposed parameters in bf16, which kernels repack depending on their memory
    order, and a flat buffer may change that order. adds: new gradients are added to existing ones,
    for a moment held next to them, which is not predicted.
    """
    if sometimes_used(case.model):
        return ("gathered",)
    repacked = any(block.transposed and block.dtype == "bf16" for block in case.model.blocks)
    if case.model.user is not None or repacked or adds:
        return ("gathered", "bucket")
    return ("gathered", "bucket", *WORKING)


class ModelMemory(NamedTuple):
    """Memory of the model itself between two events, in bytes above the level before its forward.

    most: right after an allocation, None if there was none; end: when the second event comes.
    """

    most: int | None
    end: int


NOTHING = ModelMemory(None, 0)


def model_memory(events: Iterable[str | Allocation]) -> Iterator[ModelMemory]:
    """Iterate over the model's memory, from allocator records with a mark for each event.

    Earlier allocations are not counted.
    """
    alive: dict[int, int] = {}
    held = 0
    most: int | None = None
    for one in events:
        if isinstance(one, str):
            yield ModelMemory(most, held)
            most = None
        elif one.bytes > 0:
            if not works("other", one.bytes):
                continue
            alive[one.address] = one.bytes
            held += one.bytes
            most = held if most is None else max(most, held)
        else:
            held -= alive.pop(one.address, 0)


class LiveMemory:
    """Live memory, and its maximum in each phase of each step."""

    def __init__(self) -> None:
        self._held: dict[tuple[Category, Hashable], int] = {}
        self._sums: Counter[Category] = Counter()
        self._model = 0
        self._at: tuple[int, Phase] = (-1, "built")
        self._highest: dict[tuple[int, Phase], Counter[Term]] = {}

    def at(self, step: int, phase: Phase) -> None:
        """Begin a phase."""
        self._at = step, phase
        self._instant()

    def hold(self, category: Category, key: Hashable, size: int) -> None:
        """Allocate `size` bytes, unless the key is held already."""
        if (category, key) not in self._held and works(category, size):
            self._held[category, key] = size
            self._sums[category] += size
            self._instant(ALLOCATED.get(category))

    def free(self, category: Category, key: Hashable) -> None:
        """Free a key's bytes, if it is held."""
        self._sums[category] -= self._held.pop((category, key), 0)

    def keys(self, category: Category) -> Sequence[Hashable]:
        """Return the keys held in a category."""
        return [key for kind, key in self._held if kind == category]

    def of_model(self, memory: ModelMemory) -> None:
        """Account for the model's computation up to the next event."""
        if memory.most is not None:
            self._model = memory.most
            self._instant()
        self._model = memory.end

    def gradient(self, name: str, size: int) -> None:
        """Move bytes of the model to a gradient, which other code is to free."""
        if not works("other", size):
            return
        self._model -= size
        if ("other", name) not in self._held:  # else it was added to that
            self._held["other", name] = size
            self._sums["other"] += size

    def added(self, size: int) -> None:
        """Free bytes of the model: a gradient that is added to another one."""
        if works("other", size):
            self._model -= size

    def highest(self, terms: Collection[Term]) -> tuple[Highest, ...]:
        """Return the maximum of each term in each phase.

        For a step's last phase, in which the optimizer computes, only of gathered parameters.
        """
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
                terms[term] = max(terms[term], self._sums.total() + self._model)
