"""Causes of a gradient whose elements are right but misplaced: swapped or shifted shards.

Each candidate moves elements within the flat buffers of the implementation, as it showed them, and
is compared like all others. Two elements seldom agree by chance within a few units of round-off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ... import causes as bugs
from ...floating_point import Enclosure
from .. import vectors
from ..flat import NOBODY, FlatBuffer
from ..pieces import Enclosing, Positions, some, split
from .evidence import Candidate, Evidence, enclosed_sum, enclosing, everything, slack

MOST_SHIFTS = 32
"""Shifts that are tried: so many elements of a buffer may have the value that one of them has."""


def candidates(evidence: Evidence, wrong: torch.Tensor) -> Iterator[Candidate]:
    """Iterate over gradients with misplaced elements. wrong: mask of the wrong tensors."""
    yield from _tail(evidence, wrong)
    size, world = evidence.layout.size, len(evidence.passes.gradients)
    if world > 1 and evidence.buffers:
        for name, words, order in orders(world):
            places = moved(size, evidence.buffers, lambda one, order=order: _rows(one, order))  # type: ignore[misc]
            yield Candidate(name, words, [_moved(evidence, places)])
        yield from _reduced_twice(evidence)
    yield from _without_gaps(evidence)
    yield from _after_unused(evidence)


def _tail(evidence: Evidence, wrong: torch.Tensor) -> Iterator[Candidate]:
    """Right gradient, with 0 for the last elements of each wrong tensor."""
    outside = torch.zeros(evidence.layout.size, dtype=torch.bool)
    for here in split(evidence.layout.size):
        exact, bound = evidence.right.at(here)
        whole = evidence.held.whole[here]
        outside[here] = wrong[here] & ~((whole - exact).abs() <= bound) & ~whole.isnan()
    there_is = False
    for place in evidence.layout.places:
        mask = outside[place.start : place.stop]
        if bool(mask.any()):
            first = int(mask.to(torch.uint8).argmax())
            there_is = there_is or first > 0
            mask[first:] = True

    def at(positions: Positions | None) -> Enclosure:
        exact, bound = evidence.right.at(positions)
        kept = ~some(outside, positions)
        return Enclosure(torch.where(kept, exact, 0.0), torch.where(kept, bound, 0.0))

    if there_is:
        yield Candidate(
            bugs.TAIL_LEFT_OUT,
            "the last elements of tensors are 0: they were taken for padding",
            [enclosing(evidence, at)],
        )


def orders(world: int) -> Iterator[tuple[str, str, list[int]]]:
    """Iterate over (cause, sentence, order): order[rank] is the rank whose shard it gets.

    With 2 ranks the first two kinds are one.
    """
    ranks = list(range(world))
    for other in ranks:
        for one in ranks[:other]:
            order = list(ranks)
            order[one], order[other] = other, one
            yield (
                bugs.SHARDS_EXCHANGED,
                f"the shards of ranks {one} and {other} changed places",
                order,
            )
    for by in range(1, world):
        words = f"each rank r holds the shard of rank r + {by} (modulo {world})"
        yield bugs.SHARD_OF_ANOTHER_RANK, words, [(rank + by) % world for rank in ranks]
    for one in ranks:
        words = f"every rank holds the shard of rank {one}"
        yield bugs.SHARD_OF_ANOTHER_RANK, words, [one] * world


def moved(
    size: int, buffers: Sequence[FlatBuffer], move: Callable[[FlatBuffer], torch.Tensor]
) -> torch.Tensor:
    """Return the place that each element comes from, (size,) int64; NOBODY where that is padding.

    move(buffer): the places of `buffer.shards`, after a move.
    """
    places = vectors.ranges([0], [size])
    for buffer in buffers:
        into, given = buffer.elements, move(buffer).reshape(-1)
        for part in split(len(into)):
            inside = into[part] != NOBODY
            places[into[part][inside]] = given[part][inside]
    return places


def _rows(buffer: FlatBuffer, order: Sequence[int]) -> torch.Tensor:
    """Return the buffer's shards in another order."""
    rows = vectors.empty(*buffer.shards.shape, dtype=torch.int64)
    for row, rank in zip(rows, order, strict=True):
        row.copy_(buffer.shards[rank])
    return rows


def _moved(evidence: Evidence, places: torch.Tensor) -> Enclosing:
    """Expected gradient with elements taken from other places. Padding is 0."""

    def at(positions: Positions | None) -> Enclosure:
        here = some(places, positions)
        inside = here != NOBODY
        exact, bound = evidence.right.at(here)
        return Enclosure(torch.where(inside, exact, 0.0), torch.where(inside, bound, 0.0))

    return enclosing(evidence, at)


def _reduced_twice(evidence: Evidence) -> Iterator[Candidate]:
    """Gradient of reduced shards that are summed over ranks once more: element 7 of every shard.

    W - 1 additions and a division round more.
    """
    world = len(evidence.passes.gradients)
    shards = [buffer.shards for buffer in evidence.buffers]
    columns = vectors.empty(world, sum(one.shape[1] for one in shards), dtype=torch.int64)
    torch.cat(shards, 1, out=columns)
    column = vectors.empty(evidence.layout.size, dtype=torch.int64).fill_(NOBODY)
    for shard in columns:
        for part in split(len(shard)):
            inside = shard[part] != NOBODY
            column[shard[part][inside]] = inside.nonzero().reshape(-1) + part.start
    for words, divisor in (("averaged", world), ("summed", 1)):

        def at(positions: Positions | None, divisor: int = divisor) -> Enclosure:
            sources = some(column, positions)
            there = columns[:, sources]
            kept, inside = sources == NOBODY, there != NOBODY
            terms = evidence.right.at(there.reshape(-1))
            exact, bound = (torch.where(inside, vector.view(there.shape), 0.0) for vector in terms)
            before = evidence.right.at(positions)

            def again(terms: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
                return torch.where(kept, before, terms.sum(0) / divisor)

            widened = again(bound, before.bound)
            size = again(exact.abs(), before.exact.abs())
            error = widened + slack(evidence, world + 3, size + widened, positions)
            return Enclosure(again(exact, before.exact), error)

        yield Candidate(
            bugs.REDUCED_TWICE,
            f"the shards of all ranks, which are reduced already, were {words} over ranks again",
            [enclosing(evidence, at)],
        )


def shifted(evidence: Evidence, wrong: torch.Tensor) -> Iterator[Candidate]:
    """Gradient in which a buffer, from some tensor on, is shifted by some elements.

    Asked only if no candidate with a reason explains it: a reason can be why it is shifted.
    """
    for by in _shifts(evidence, wrong):
        words = f"it is that of the element {abs(by)} {'after' if by > 0 else 'before'} it"
        for where, within in (("flat buffer", False), ("shard", True)):
            places = moved(
                evidence.layout.size,
                evidence.buffers,
                lambda buffer, by=by, within=within: _shift(buffer, by, within),  # type: ignore[misc]
            )
            yield Candidate(
                bugs.SHIFTED,
                f"the gradient is shifted by {abs(by)} elements: {words} in the {where}",
                [_moved(evidence, places)],
            )


def _shift(buffer: FlatBuffer, by: int, within: bool) -> torch.Tensor:
    rows = buffer.shards if within else buffer.elements.view(1, -1)
    places = vectors.empty(*rows.shape, dtype=torch.int64).fill_(NOBODY)
    if abs(by) < rows.shape[1]:
        low, high = max(0, -by), rows.shape[1] - max(0, by)
        places[:, low:high] = rows[:, low + by : high + by]
    return places.view_as(buffer.shards)


def _shifts(evidence: Evidence, wrong: torch.Tensor) -> list[int]:
    """Return possible shifts: places that hold the value of the largest wrong element."""
    whole = evidence.held.whole
    largest, most = NOBODY, -1.0
    for part in split(evidence.layout.size):
        exact, bound = evidence.right.at(part)
        outside = wrong[part] & ((whole[part] - exact).abs() > bound)
        size = torch.where(outside, whole[part].abs(), -1.0)
        if float(size.max()) > most:
            largest, most = part.start + int(size.argmax()), float(size.max())
    if largest == NOBODY:
        return []
    value = whole[largest].to(torch.float64)
    for buffer in evidence.buffers:
        elements = buffer.elements
        here = (elements == largest).nonzero().reshape(-1)
        if not len(here):
            continue
        found: list[int] = []
        for part in split(len(elements)):
            exact, bound = evidence.right.at(elements[part])
            near = (elements[part] != NOBODY) & ((exact - value).abs() <= bound)
            found += (near.nonzero().reshape(-1) + part.start - here[0]).tolist()
            if len(found) > MOST_SHIFTS:
                break
        return [by for by in found if by][:MOST_SHIFTS]
    return []


def _without_gaps(evidence: Evidence) -> Iterator[Candidate]:
    """Gradient shifted, before the reduction, over parameters that have no gradient."""
    if bool(evidence.passes.arrived.all()):
        return
    terms = evidence.passes.gradients
    for padded in (True, False):
        changed = vectors.copy(terms)
        for buffer, spans in _spans(evidence, padded=padded):
            inside = buffer.elements != NOBODY
            for into, given, arrived in _passes(evidence, changed, terms):
                places = vectors.empty(len(buffer.elements), dtype=torch.int64).fill_(NOBODY)
                shift = 0
                for position, start, stop in spans:
                    if arrived[position]:
                        places[start - shift : stop - shift] = buffer.elements[start:stop]
                    else:
                        shift += stop - start
                if shift:
                    values = torch.where(places != NOBODY, given[places], 0.0)
                    into[buffer.elements[inside]] = values[inside]
        if not torch.equal(changed, terms):
            yield Candidate(
                bugs.OFFSET_NOT_MOVED,
                "a parameter without a gradient did not move the offset in the flat buffer, so "
                "that all that follow it stand too far ahead",
                [enclosed_sum(evidence, everything, evidence.divisor, given=changed)],
            )


def _after_unused(evidence: Evidence) -> Iterator[Candidate]:
    """Gradient with 0 on a rank for all that follows a gradientless parameter in its buffer."""
    if bool(evidence.passes.arrived.all()):
        return
    terms = evidence.passes.gradients
    changed = vectors.copy(terms)
    for _, spans in _spans(evidence, padded=False):
        for into, _, arrived in _passes(evidence, changed, terms):
            missing = False
            for position, _, _ in spans:
                missing = missing or not arrived[position]
                if missing:
                    place = evidence.layout.places[position]
                    into[place.start : place.stop] = 0.0
    if not torch.equal(changed, terms):
        yield Candidate(
            bugs.LEFT_OUT_AFTER_AN_UNUSED_ONE,
            "where a rank has no gradient of a parameter, its gradients of those that follow in "
            "the flat buffer are left out",
            [enclosed_sum(evidence, everything, evidence.divisor, given=changed)],
        )


def _passes(
    evidence: Evidence, changed: torch.Tensor, terms: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[bool]]]:
    """Iterate over backwards: (gradients to change, the originals, which parameters have one)."""
    for rank, passes in enumerate(evidence.passes.arrived.tolist()):
        for number, arrived in enumerate(passes):
            yield changed[rank, number], terms[rank, number], arrived


def _spans(
    evidence: Evidence, *, padded: bool
) -> Iterator[tuple[FlatBuffer, list[tuple[int, int, int]]]]:
    """Iterate over buffers of several parameters, with (position, start, stop) of each parameter.

    Each parameter is in one piece: what is cut into shards one by one, as by DeepSpeed's stage 3,
    has no offset in common. padded: with the padding that follows it.
    """
    layout = evidence.layout
    numbers = {place.name: number for number, place in enumerate(layout.places)}
    for buffer in evidence.buffers:
        starts = buffer.starts(layout)
        if len(starts) < 2:
            continue
        ends = [start for _, start in starts[1:]] + [len(buffer.elements)]
        found = []
        for (name, start), end in zip(starts, ends, strict=True):
            place = layout.by_name[name]
            stop = end if padded else start + place.stop - place.start
            found.append((numbers[name], start, stop))
        if all(stop <= end for (_, _, stop), end in zip(found, ends, strict=True)):
            yield buffer, found
