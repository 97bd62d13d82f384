"""Attribution of a gradient whose elements come from several places: ranges, element by element.

Each element of what no table explains is compared with the right gradient at other places, and
with what a few tables give at its own. Sources that explain most elements are taken first; what
they explain is merged into ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ...floating_point import Enclosure
from ..compare import exactly
from ..diagnose.evidence import weighted
from ..layout import ParameterLayout
from .cells import HeldCell, Holder
from .gradient import GradientSearch
from .sentences import NOTHING
from .table import Table
from .tensors import numbered, tensors
from .values import ENOUGH

MOST_SOURCES = 12
"""Sources of the elements that one holder has wrong."""

MOST_RUNS = 1000
"""Runs of one holder: more explain nothing."""

MOST_SEARCHED = 1 << 17
"""Elements up to which wrong gradients are looked for at other places too."""

FEW = 64
"""Elements of which one may be left unexplained, which the sentence says."""

MOST_LISTED = 12
"""Ranges of elements at their own place, above which the sentence names their kinds alone."""

MOST_RANGES = 4
"""Ranges that a sentence names."""


class GradientSource(NamedTuple):
    """Origin of elements: enclosures of them all, for an origin at their own place."""

    words: str
    enclosure: Enclosure
    offset: int = 0
    """Distance of the place of origin in the flat vector."""


class Run(NamedTuple):
    """Consecutive elements of a holder that one source explains."""

    start: int
    """First and last position in the flat vector."""
    last: int
    source: GradientSource

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.last - self.start + 1


def mixtures(search: GradientSearch) -> tuple[list[str], list[int]]:
    """Return (sentences, numbers of the cells that they explain), of cells without a table."""
    by_holder: dict[tuple[int, ...], list[int]] = {}
    for number in search.open:
        by_holder.setdefault(search.cells[number].holder.ranks, []).append(number)
    found: dict[str, tuple[list[int], dict[str, None]]] = {}
    explained: list[int] = []
    for ranks, numbers in by_holder.items():
        chosen = [search.cells[number] for number in numbers]
        runs = _runs(search, chosen)
        if runs is None:
            continue
        explained += numbers
        for operation, names in _operations(runs, chosen, search).items():
            holders, tensors_ = found.setdefault(operation, ([], {}))
            holders.extend(ranks)
            tensors_.update(dict.fromkeys(names))
    world = search.evidence.case.world_size
    sentences = []
    for operation, (holders, names_) in found.items():
        where = "" if len(holders) == world else f"on {numbered(holders, 'rank')}, "
        words = tensors(list(names_), search.evidence.layout)
        sentences.append(f"{where}gradient of {words}: {operation}")
    return sentences, explained


def _runs(search: GradientSearch, chosen: Sequence[HeldCell]) -> list[Run] | None:
    """Return the fewest runs that explain every element, or None.

    From each run's end the source is taken that explains most elements after it.
    """
    positions = torch.cat([cell.positions for cell in chosen])
    values = torch.cat([cell.values for cell in chosen])
    positions, order = positions.sort()
    values = values[order]
    sources: list[GradientSource] = []
    fits = torch.zeros(0, len(positions), dtype=torch.bool)
    for more in _sources(search, chosen[0].holder, positions, values):
        sources += more
        fits = torch.cat([fits, *(_fits(source, values).unsqueeze(0) for source in more)])
        left = ~fits.any(0)
        if not bool(left.any()):
            break
    if FEW * int(left.sum()) > len(positions):
        return None
    if bool(left.any()):
        sources.append(GradientSource("not explained", exactly(values)))
        fits = torch.cat([fits, left.unsqueeze(0)])
    ends = _ends(fits)
    spread = _spread(values, search.evidence.right.whole.exact[positions])
    runs: list[Run] = []
    gain = 0.0
    at = 0
    while at < len(positions):
        best = int(ends[:, at].argmax())
        stop = int(ends[best, at])
        runs.append(Run(int(positions[at]), int(positions[stop - 1]), sources[best]))
        if sources[best].words != "right":
            gain += _bits(sources[best], spread, at, stop) - _choice(sources, best, positions)
        at = stop
        if len(runs) > MOST_RUNS:
            return None
    return runs if gain > ENOUGH else None


def _spread(*vectors: torch.Tensor) -> float:
    """Return the largest finite size among values, at least the smallest normal number."""
    sizes = [one[one.isfinite()].abs() for one in vectors]
    largest = [float(one.max()) for one in sizes if one.numel()]
    return max(*largest, torch.finfo(torch.float32).tiny, 0.0)


def _bits(source: GradientSource, spread: float, start: int, stop: int) -> float:
    """Return the bits by which elements support a source: -log2 of the chance that each fits.

    A value that has nothing to do with the source lies anywhere between the largest ones, and in an
    interval of the width 2 b of their 2 max with the chance b / max. What is computed in fp32 has
    no more than 24 bits. spread: max.
    """
    if source.words == "not explained":
        return 0.0
    chance = (source.enclosure.bound[start:stop].double() / spread).clamp(2.0**-24, 1.0)
    return float(-chance.log2().sum())


def _choice(sources: Sequence[GradientSource], best: int, positions: torch.Tensor) -> float:
    """Return the bits that are chosen for a run: its end, its source, and how far it was moved."""
    moved = len(positions) if sources[best].offset else 1
    return math.log2(len(positions)) + math.log2(len(sources)) + math.log2(moved)


def _fits(source: GradientSource, values: torch.Tensor) -> torch.Tensor:
    if source.words == "NaN":
        return values.isnan()
    if source.words == "infinite":
        return values.isinf()
    return (values - source.enclosure.exact).abs() <= source.enclosure.bound


def _ends(fits: torch.Tensor) -> torch.Tensor:
    """Return, per source and element, the end of the run of True that begins there."""
    count = fits.shape[1]
    numbers = torch.arange(count).expand_as(fits)
    ends = torch.where(fits, torch.full_like(numbers, count), numbers)
    flipped = ends.flip(1).cummin(1).values
    return flipped.flip(1)


def _sources(
    search: GradientSearch, holder: Holder, positions: torch.Tensor, values: torch.Tensor
) -> Iterator[list[GradientSource]]:
    """Iterate over sets of origins, likely ones first. Enclosures are of these positions."""
    right = search.evidence.right.whole
    zero = exactly(torch.zeros(len(positions)))
    plain = [
        GradientSource("right", Enclosure(right.exact[positions], right.bound[positions])),
        *_moved("", right, positions, values),
        GradientSource("0", zero),
    ]
    if bool(values.isnan().any()):
        plain.append(GradientSource("NaN", zero))
    if bool(values.isinf().any()):
        plain.append(GradientSource("infinite", zero))
    yield plain
    made = [
        (words, weighted(search.evidence, table.filled, table.others, search.others))
        for words, table in _tables(search, holder)
    ]
    yield [GradientSource(words, of.only(positions)) for words, of in made]
    if len(positions) <= MOST_SEARCHED:
        for words, of in made:
            yield list(_moved(words, of.whole, positions, values))


def _tables(search: GradientSearch, holder: Holder) -> Iterator[tuple[str, Table]]:
    world, count = search.evidence.passes.gradients.shape[:2]
    ones = torch.ones(world, count, dtype=torch.float64)
    if world > 1:
        own = ones * 0
        own[holder.ranks[0]] = 1
        yield "the rank's own gradient divided by W", Table(own)
        yield "the rank's own gradient", Table(own * world)
        yield "the sum over ranks, not divided", Table(ones * world)
        early = ones * world
        early[holder.ranks[0]] = 1
        yield "the sum with the rank's own part divided by W before it was added", Table(early)
    if count > 1:
        last = ones * 0
        last[:, -1] = 1
        yield "the last microbatch alone", Table(last)
    for name in search.others:
        yield name, Table(ones * 0, {name: 1.0})


def _moved(
    words: str, right: Enclosure, positions: torch.Tensor, values: torch.Tensor
) -> Iterator[GradientSource]:
    """Iterate over a gradient at other places, those with most elements first.

    words: of the gradient, "" for the right one.
    """
    exact, order = right.exact.sort()
    offsets: list[torch.Tensor] = []
    chosen = values != 0
    at = torch.searchsorted(exact, values[chosen])
    for neighbour in (-2, -1, 0, 1):
        near = (at + neighbour).clamp(0, len(exact) - 1)
        origin = order[near]
        fits = (values[chosen] - right.exact[origin]).abs() <= right.bound[origin]
        offsets.append((origin - positions[chosen])[fits])
    found, counts = torch.unique(torch.cat(offsets), return_counts=True)
    for place in counts.argsort(descending=True, stable=True).tolist()[:MOST_SOURCES]:
        offset = int(found[place])
        if offset == 0:
            continue
        origin = positions + offset
        inside = (origin >= 0) & (origin < len(right.exact))
        safe = origin.clamp(0, len(right.exact) - 1)
        bound = torch.where(inside, right.bound[safe], torch.full_like(right.bound[safe], -1.0))
        yield GradientSource(words, Enclosure(right.exact[safe], bound), offset)


def _operations(
    runs: Sequence[Run], chosen: Sequence[HeldCell], search: GradientSearch
) -> dict[str, list[str]]:
    """Return what the runs say, each with the names of the tensors that it is about."""
    layout = search.evidence.layout
    wrong = [run for run in runs if run.source.words != "right"]
    offsets = {run.source.offset for run in wrong if run.source.offset}
    kinds = dict.fromkeys(run.source.words for run in wrong)
    names = [cell.place.name for cell in chosen]
    moved = sum(run.elements for run in wrong if run.source.offset)
    mostly = 2 * moved > sum(run.elements for run in wrong)
    origins = dict.fromkeys(run.source.words for run in wrong if run.source.offset)
    whose = next((f", of {words}" for words in origins if words), "")
    left = sum(r.elements for r in wrong if r.source.words == "not explained")
    but = f"; {left} more elements are not explained" if left else ""
    if mostly and len(offsets) == 1:
        return {f"elements stand {_away(-offsets.pop())} in the flat vector{whose}{but}": names}
    origin = _origin(wrong, chosen[0].holder, search) if mostly else None
    if origin is not None:
        ranks = numbered(chosen[0].holder.ranks, "rank")
        return {f"{ranks} holds the shard that rank {origin} must hold{whose}{but}": names}
    if [*kinds] == ["0"] and sum(run.elements for run in wrong) == sum(
        len(cell.positions) for cell in chosen
    ):
        return {NOTHING: names}
    if len(wrong) > MOST_LISTED and not offsets:
        return {f"elements are {', others '.join(kinds)}": names}
    parts = [_run(run, layout) for run in wrong]
    more = len(parts) - MOST_RANGES
    shown = "; ".join(parts[:MOST_RANGES])
    return {shown + (f"; and {more} more ranges" if more > 0 else ""): names}


def _origin(runs: Sequence[Run], holder: Holder, search: GradientSearch) -> int | None:
    """Return the rank that must hold all elements that were moved, or None."""
    moved = [run for run in runs if run.source.offset]
    places = torch.cat([torch.arange(run.start, run.last + 1) + run.source.offset for run in moved])
    for rank, plan in enumerate(search.evidence.held.plans):
        if rank in holder.ranks or plan.index is None:
            continue
        if bool(torch.isin(places, plan.index).all()):
            return rank
    return None


def _away(offset: int) -> str:
    places = f"{abs(offset)} place{'s' if abs(offset) != 1 else ''}"
    return f"{places} {'later' if offset > 0 else 'earlier'}"


def _run(run: Run, layout: ParameterLayout) -> str:
    where = _range(run.start, run.last + 1, layout)
    offset = run.source.offset
    if offset:
        there = _range(run.start + offset, run.last + 1 + offset, layout)
        return f"{where} holds {there}" + (f" of {run.source.words}" if run.source.words else "")
    return f"{where} is {run.source.words}"


def _range(start: int, stop: int, layout: ParameterLayout) -> str:
    """Return the elements [start, stop) of the flat vector, by tensor: "head.bias[1:3]"."""
    inside = [place for place in layout.places if place.start < stop and place.stop > start]
    parts = []
    for place in inside:
        low, high = max(start, place.start) - place.start, min(stop, place.stop) - place.start
        whole = low == 0 and high == place.stop - place.start
        parts.append(place.name if whole else f"{place.name}[{low}:{high}]")
    return parts[0] if len(parts) == 1 else f"{parts[0]} to {parts[-1]}" if parts else "nothing"
