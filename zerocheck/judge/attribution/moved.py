"""Moved values: a transposed or exchanged tensor, shards in another order, shifts and strides.

Offsets are not guessed: equal values of a sample vote for them, and every element is compared then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ..flat import NOBODY
from ..layout import ParameterLayout, ParameterPlace
from .values import ENOUGH, Origin, Source, ValueIndex, bits, choices

BITS = 24
"""Significant bits of a value of fp32: those that one vote for an offset can have."""
LEAST_VOTES = 4
"""Votes that an offset needs in a sample: in a random order fewer coincide by chance."""
MOST_OFFSETS = 48
"""Offsets of a source that are compared, those with most votes."""


@dataclass(frozen=True)
class StorageOrder:
    """Order in which elements are stored one after the other: the layout's, or flat buffers'."""

    words: str
    """Name of the buffer of one tensor in sentences: "its flat buffer"."""
    many: str
    """Name of the buffers of several: "their flat buffers"."""
    buffers: Sequence[torch.Tensor]
    """Position in the layout of each slot of each buffer, (ranks, slots of a rank) int64; NOBODY
    for padding. One row where a buffer is not sharded."""

    _slots: torch.Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False)

    @cached_property
    def elements(self) -> torch.Tensor:
        """Position of each slot, one buffer after the other."""
        return torch.cat([one.reshape(-1) for one in self.buffers])

    @cached_property
    def sizes(self) -> torch.Tensor:
        """Slots of each buffer."""
        return torch.tensor([one.numel() for one in self.buffers])

    @cached_property
    def numbers(self) -> torch.Tensor:
        """Number of the buffer of each slot."""
        return torch.repeat_interleave(torch.arange(len(self.buffers)), self.sizes)

    @property
    def sharded(self) -> bool:
        """True if there are several ranks, with as many slots each."""
        ranks = {len(one) for one in self.buffers}
        return len(ranks) == 1 and ranks != {1}

    def slots(self, size: int) -> torch.Tensor:
        """Return the slot of each position of the layout, NOBODY for those that it has not."""
        if len(self._slots) != size:
            object.__setattr__(self, "_slots", _inverse(self.elements, size))
        return self._slots

    def shifted(self, slots: torch.Tensor, by: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (slots some places further on in their buffers, mask of those beyond its ends).

        Those beyond the ends are counted from the other end.
        """
        numbers = self.numbers[slots]
        sizes = self.sizes[numbers]
        starts = (self.sizes.cumsum(0) - self.sizes)[numbers]
        there = slots - starts + by
        return starts + there % sizes, (there < 0) | (there >= sizes)


class Tensors:
    """Hypotheses on whole tensors: each is another one, or transposed."""

    def __init__(self, observed: torch.Tensor, layout: ParameterLayout) -> None:
        self.observed, self.layout = observed, layout

    def transposed(self, source: Source) -> Iterator[Origin]:
        """Iterate over the values with the dims of every matrix exchanged, in both directions."""
        for forth in (True, False):
            made = source.vector.clone()
            for place in self.layout.places:
                if len(place.shape) == 2 and 1 not in place.shape:
                    shape = place.shape if forth else place.shape[::-1]
                    part = source.vector[place.start : place.stop].view(shape)
                    made[place.start : place.stop] = part.t().reshape(-1)
            yield _of_vector(source, "transposed", made)
        order = self.layout.memory_order
        if order is not None:
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order))
            yield _of_vector(source, "in the order of its memory", source.vector[order])
            yield _of_vector(
                source, "in another order than that of its memory", source.vector[back]
            )

    def exchanged(self, source: Source, wrong: torch.Tensor) -> Iterator[Origin]:
        """Iterate over tensors with one of the wrong positions that have all values of another."""
        starts = torch.tensor([place.start for place in self.layout.places])
        touched = torch.unique(torch.searchsorted(starts, wrong, right=True) - 1).tolist()
        for place in (self.layout.places[number] for number in touched):
            observed_bits = bits(self.observed[place.start : place.stop])
            for other in self.layout.places:
                alike = other.stop - other.start == len(observed_bits)
                if other is place or not alike or not len(observed_bits):
                    continue
                if bits(source.vector[other.start : other.start + 1])[0] != observed_bits[0]:
                    continue
                if torch.equal(bits(source.vector[other.start : other.stop]), observed_bits):
                    yield _exchange(source, place, other)


class ShardOrders:
    """Hypotheses on flat buffers: their shards are in another order."""

    def __init__(self, observed: torch.Tensor, wrong: torch.Tensor) -> None:
        """Build it. wrong: positions of wrong elements."""
        self.observed = observed
        self.wrong = torch.zeros(len(observed), dtype=torch.bool)
        self.wrong[wrong] = True

    def reordered(self, source: Source, lines: Sequence[StorageOrder]) -> Iterator[Origin]:
        """Iterate over the values of a source with other shards in the place of wrong ones."""
        for line in lines:
            if line.sharded:
                origin = self._best(source, torch.cat(tuple(line.buffers), 1))
                if origin is not None:
                    yield origin

    def _best(self, source: Source, shards: torch.Tensor) -> Origin | None:
        """Return the order in which each wrong shard is the one that fits best."""
        ranks = len(shards)
        order = list(range(ranks))
        for into, places in enumerate(shards):
            here = (places != NOBODY) & self.wrong[places.clamp(min=0)]
            observed_bits = bits(self.observed[places[here]])
            fits = [
                int((bits(_taken(source, shards[of][here])) == observed_bits).sum())
                for of in range(ranks)
            ]
            if max(fits) > 0:
                order[into] = max(range(ranks), key=fits.__getitem__)
        if order == list(range(ranks)):
            return None
        slots = _inverse(shards.reshape(-1), len(self.observed))
        moved = shards[order].reshape(-1)
        words = f"in another order of shards: {_order_words(order)}"
        return Origin(
            f"is {source.one} {words}",
            f"are {source.many} {words}",
            lambda at: _taken(source, moved[slots[at]]),
            lambda at: slots[at] != NOBODY,
            level=2,
            cost=choices(ranks) * sum(one != rank for rank, one in enumerate(order)),
            key=("order", *order),
        )


class Offsets:
    """Hypotheses on elements: all stand some places away, or are every n-th one."""

    def __init__(self, observed: torch.Tensor, layout: ParameterLayout) -> None:
        self.observed, self.size = observed, layout.size

    def shifted(
        self, source: Source, lines: Sequence[StorageOrder], index: ValueIndex
    ) -> Iterator[Origin]:
        """Iterate over the values that stand some places further on, or back, in a line."""
        into, of = index.pairs(source.vector)
        if not len(into):
            return
        for line in lines:
            slots = line.slots(self.size)
            inside = (slots[into] != NOBODY) & (slots[of] != NOBODY)
            steps = (slots[of] - slots[into])[inside]
            found, votes = torch.unique(steps[steps != 0], return_counts=True)
            enough = votes * BITS >= choices(2 * self.size) + ENOUGH
            if len(index) < self.size:
                enough &= votes >= LEAST_VOTES
            found, votes = found[enough], votes[enough]
            for by in found[votes.argsort(descending=True)][:MOST_OFFSETS].tolist():
                yield self._shift(source, line, slots, by, wrapped=False)
                if 2 * abs(by) <= int(line.sizes.max()):
                    yield self._shift(source, line, slots, by, wrapped=True)

    def _shift(
        self, source: Source, line: StorageOrder, slots: torch.Tensor, by: int, *, wrapped: bool
    ) -> Origin:
        def known(at: torch.Tensor) -> torch.Tensor:
            _, beyond = line.shifted(slots[at].clamp(min=0), by)
            return (slots[at] != NOBODY) & (beyond.logical_not() | wrapped)

        def vector(at: torch.Tensor) -> torch.Tensor:
            there, _ = line.shifted(slots[at].clamp(min=0), by)
            return _taken(source, line.elements[there])

        places = f"{abs(by)} {'element' if abs(by) == 1 else 'elements'}"
        words = f"{places} {'further on' if by > 0 else 'further back'}"
        ends = ", those beyond an end from the other end" if wrapped else ""
        return Origin(
            f"is {source.one} {words} in {line.words}{ends}",
            f"are {source.many} {words} in {line.many}{ends}",
            vector,
            known,
            level=4 if wrapped else 3,
            cost=choices(2 * self.size),
            key=("shift", by),
        )

    def strided(self, source: Source, index: ValueIndex) -> Iterator[Origin]:
        """Iterate over the values that take every n-th element, or stand at every n-th one."""
        into, of = index.pairs(source.vector)
        order = into.argsort()
        into, of = into[order], of[order]
        for every, first, second in ((True, into, of), (False, of, into)):
            turn = first.argsort()
            first, second = first[turn], second[turn]
            ahead, step = first.diff(), second.diff()
            regular = (ahead == 1) & (step.abs() > 1)
            if not bool(regular.any()):
                continue
            at, by = first[:-1][regular], step[regular]
            lines = torch.stack((by, second[:-1][regular] - by * at), 1)
            found, votes = torch.unique(lines, dim=0, return_counts=True)
            enough = votes * BITS >= 2 * choices(2 * self.size) + ENOUGH
            found, votes = found[enough], votes[enough]
            for stride, start in found[votes.argsort(descending=True)][:MOST_OFFSETS].tolist():
                yield self._stride(source, stride, start, every=every)

    def _stride(self, source: Source, stride: int, start: int, *, every: bool) -> Origin:
        def there(at: torch.Tensor) -> torch.Tensor:
            return at * stride + start if every else (at - start).div(stride, rounding_mode="floor")

        def known(at: torch.Tensor) -> torch.Tensor:
            inside = (there(at) >= 0) & (there(at) < self.size)
            return inside if every else inside & ((at - start) % stride == 0)

        def vector(at: torch.Tensor) -> torch.Tensor:
            return _taken(source, there(at).clamp(0, self.size - 1))

        words = (
            f"with a stride of {stride} elements"
            if every
            else f"of consecutive elements, {abs(stride)} apart here"
        )
        return Origin(
            f"is {source.one} {words}",
            f"are {source.many} {words}",
            vector,
            known,
            level=5,
            cost=2 * choices(2 * self.size),
            key=("stride", every, stride, start),
        )


def elsewhere(source: Source, observed: torch.Tensor) -> Origin:
    """Return the hypothesis that each element is some other one of the source, in no order."""
    ordered, order = bits(source.vector).sort()

    def first(at: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(ordered, bits(observed[at])).clamp(max=len(ordered) - 1)

    return Origin(
        f"has values of other elements of {source.one}, in no regular order",
        f"have values of other elements of {source.many}, in no regular order",
        lambda at: source.vector[order[first(at)]],
        level=6,
        each=choices(len(ordered)),
        cost=1.0,
        share=0.5,
    )


def _inverse(places: torch.Tensor, size: int) -> torch.Tensor:
    """Return the slot of each position, given the position of each slot; NOBODY for none."""
    slots = torch.full((size,), NOBODY, dtype=torch.int64)
    inside = places != NOBODY
    slots[places[inside]] = inside.nonzero().reshape(-1)
    return slots


def _order_words(order: Sequence[int]) -> str:
    """Return an order in words. order[rank] is the rank whose shard is in its place."""
    moved = [rank for rank, one in enumerate(order) if one != rank]
    if len(moved) == 2 and order[moved[0]] == moved[1] and order[moved[1]] == moved[0]:
        return f"those of ranks {moved[0]} and {moved[1]} have changed places"
    return ", ".join(f"that of rank {order[rank]} is in the place of rank {rank}" for rank in moved)


def _taken(source: Source, places: torch.Tensor) -> torch.Tensor:
    """Return the elements at these places; 0 for padding."""
    values = source.vector[places.clamp(min=0)]
    return torch.where(places == NOBODY, torch.zeros_like(values), values)


def _of_vector(source: Source, words: str, made: torch.Tensor) -> Origin:
    return Origin(
        f"is {source.one} {words}",
        f"are {source.many} {words}",
        lambda at: made[at],
        level=1,
        cost=1.0,
    )


def _exchange(source: Source, place: ParameterPlace, other: ParameterPlace) -> Origin:
    by = other.start - place.start
    return Origin(
        f"is {source.one} of {other.name}",
        f"are {source.many} of {other.name}",
        lambda at: source.vector[(at + by).clamp(0, len(source.vector) - 1)],
        lambda at: (at >= place.start) & (at < place.stop),
        level=1,
        cost=1.0,
        partner=other.name,
    )
