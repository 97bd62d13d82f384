"""Processing of large vectors one piece at a time, so that temporaries are of a piece's size.

All enclosures are elementwise, so that a piece gives the bits that the whole would. What has one
piece is computed as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import torch

from ..floating_point import Enclosure
from ..machine.host import processors
from . import vectors

AT_ONCE = 1 << 17
"""Elements of a piece at most: 1 MiB in float64, so that temporaries stay in the processor's cache
and come from the heap: longer ones are mapped anew each time, which takes longer than they do."""

MOST_THREADS = 8
"""Above that the interpreter is what they wait for."""
T = TypeVar("T")
Positions = slice | torch.Tensor
"""Some elements of a flat vector: a range, or their numbers (int64)."""
Piece = tuple[slice, Positions]
"""The place among the elements, and the place in the flat vector."""


def split(count: int) -> list[slice]:
    """Split [0, count) into ranges of at most AT_ONCE elements, about equally long."""
    if count <= AT_ONCE:
        return [slice(0, count)]
    number = -(-count // AT_ONCE)
    ends = [count * n // number for n in range(number + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


def pieces(elements: torch.Tensor | None, size: int) -> Iterator[Piece]:
    """Iterate over pieces: (place among the elements, place in the flat vector).

    elements: positions in a flat vector of `size` elements; None: all of them.
    """
    if elements is None:
        yield from ((here, here) for here in split(size))
    else:
        yield from ((here, _run(elements[here])) for here in split(len(elements)))


def _run(elements: torch.Tensor) -> Positions:
    """Return positions that follow one another as a range: a view of it is no copy."""
    if not len(elements):
        return elements
    first, end = int(elements[0]), int(elements[-1]) + 1
    if end - first != len(elements) or not torch.equal(elements, torch.arange(first, end)):
        return elements
    return slice(first, end)


def in_pieces(elements: torch.Tensor | None, size: int) -> bool:
    """Return True if these elements have more than one piece."""
    return (size if elements is None else len(elements)) > AT_ONCE


def of_each(make: Callable[[slice, Positions], T], parts: Iterable[Piece]) -> Iterator[T]:
    """Yield what `make` returns for each piece, in their order; it runs in threads where it can.

    The first piece is computed alone: what all of them ask for is computed with it, and kept. An
    elementwise result depends on no thread. Pieces not yet begun when the caller stops are left.
    """
    first, *others = parts
    yield make(*first)
    threads = min(len(others), processors(), MOST_THREADS)
    if threads < 2:
        yield from (make(*one) for one in others)
        return
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        made = torch.no_grad()(make)
        asked = [pool.submit(made, *one) for one in others]
        try:
            yield from (one.result() for one in asked)
        finally:
            for one in asked:
                one.cancel()


def some(vector: torch.Tensor, positions: Positions | None) -> torch.Tensor:
    """Select elements of flat vectors, in the last dim; None: all of them."""
    return vector if positions is None else vector[..., positions]


class Enclosing:
    """Enclosures of each element of a flat vector, computed on demand.

    Of a vector that has one piece all are computed at the first question, and kept.
    """

    def __init__(self, size: int, make: Callable[[Positions | None], Enclosure]) -> None:
        """Build it. make(positions): the enclosures of these elements; of all of them for None."""
        self.size = size
        self._make = make
        self._whole: Enclosure | None = None

    @classmethod
    def known(cls, enclosure: Enclosure) -> Enclosing:
        """Wrap an enclosure that is already computed."""
        made = cls(len(enclosure.exact), lambda _: enclosure)
        made._whole = enclosure
        return made

    @property
    def whole(self) -> Enclosure:
        """Enclosures of all elements."""
        if self._whole is None and not in_pieces(None, self.size):
            self._whole = self._make(None)
        elif self._whole is None:
            exact = vectors.empty(self.size, dtype=torch.float64)
            bound = vectors.empty(self.size, dtype=torch.float64)
            for here in split(self.size):
                exact[here], bound[here] = self._make(here)
            self._whole = Enclosure(exact, bound)
        return self._whole

    def at(self, positions: Positions | None) -> Enclosure:
        """Return the enclosures of the elements at these positions, in order; None: of all."""
        if self._whole is None and in_pieces(None, self.size) and positions is not None:
            return self._make(positions)
        exact, bound = self.whole
        return (
            Enclosure(exact, bound)
            if positions is None
            else Enclosure(exact[positions], bound[positions])
        )

    def only(self, positions: Positions) -> Enclosure:
        """Return the enclosures of a few elements, without computing the others."""
        return self._make(positions) if self._whole is None else self.at(positions)

    def wider(self, error: torch.Tensor) -> Enclosing:
        """Return these enclosures widened by an amount per element."""

        def make(positions: Positions | None) -> Enclosure:
            exact, bound = self.at(positions)
            return Enclosure(exact, bound + some(error, positions))

        return Enclosing(self.size, make)

    def exact(self) -> Iterator[torch.Tensor]:
        """Iterate over the exact results, piece by piece."""
        for here in split(self.size):
            yield self.at(here).exact
