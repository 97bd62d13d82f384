"""Words for the places of elements: tensor classes, shards of ranks, and ranges of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from ..layout import ParameterLayout, ParameterPlace
from .tensors import classes, numbered

MOST_NAMES = 3
"""Tensors, or ranges, that a sentence lists."""


class Scope(NamedTuple):
    """Elements that have a name, such as the shards of one rank."""

    rank: int
    words: str
    """Words after the rank or ranks: "that saved"."""
    mask: torch.Tensor


class Where(NamedTuple):
    """Places in words."""

    words: str
    several: bool
    """True if it names several things."""
    shards: tuple[int, ...] = ()
    """Ranks, if it names their shards."""


def where(
    mask: torch.Tensor,
    holds: torch.Tensor,
    telling: torch.Tensor,
    layout: ParameterLayout,
    scopes: Sequence[Scope] = (),
    *,
    noun: str = "parameter",
) -> Where:
    """Return the places of elements in words, the most general that are right.

    Args:
        mask: elements that a hypothesis accounts for.
        holds: elements at which it is right, those that are not wrong too.
        telling: elements at which it differs from what is right.
        layout: tensors of the flat vector.
        scopes: shards of ranks.
        noun: name of one tensor, where all are meant.
    """
    touched = [p for p in layout.places if bool(mask[p.start : p.stop].any())]
    if all(bool(holds[p.start : p.stop].all()) for p in touched):
        found = _class(touched, telling, layout, noun)
        if found is None and len(touched) > 1:
            found = _shards(mask, holds, telling, scopes)
        return found or _run(touched, telling, layout, noun) or _names(touched, layout)
    return _shards(mask, holds, telling, scopes) or _ranges(mask, holds, touched)


def ranks_words(ranks: Collection[int]) -> str:
    """Return ranks in words: "rank 2", "ranks 1 to 3", "ranks 0 and 4"."""
    return numbered(ranks, "rank")


def listed(words: Sequence[str]) -> str:
    """Return a list in words: "a, b and c"."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _class(
    touched: Sequence[ParameterPlace], telling: torch.Tensor, layout: ParameterLayout, noun: str
) -> Where | None:
    """Return the class whose tensors these are, of all or of those that tell, or None."""
    if len(touched) < 2:
        return None
    names = [place.name for place in touched]
    for among in ([p for p in layout.places if p.stop > p.start], _telling(telling, layout)):
        for words, inside in classes(noun):
            if names == [place.name for place in among if inside(place)]:
                return Where(words, False)
    return None


def _run(
    touched: Sequence[ParameterPlace], telling: torch.Tensor, layout: ParameterLayout, noun: str
) -> Where | None:
    """Return a run of many tensors, or a parameter group, or None."""
    names = [place.name for place in touched]
    tells = _telling(telling, layout)
    numbers = [number for number, place in enumerate(tells) if place in touched]
    if len(names) > MOST_NAMES and numbers[-1] - numbers[0] == len(numbers) - 1:
        return Where(f"every {noun} from {names[0]} to {names[-1]}", False)
    for group in sorted({place.group for place in tells}) if len(names) > 1 else ():
        if names == [place.name for place in tells if place.group == group]:
            return Where(f"every {noun} of group {group}", False)
    return None


def _telling(telling: torch.Tensor, layout: ParameterLayout) -> list[ParameterPlace]:
    return [p for p in layout.places if bool(telling[p.start : p.stop].any())]


def _names(touched: Sequence[ParameterPlace], layout: ParameterLayout) -> Where:
    """Return tensors by name, with what all of them are and others are not."""
    words = _some([place.name for place in touched], "others")
    tied = set(layout.aliases.values())
    kinds: dict[str, Callable[[ParameterPlace], bool]] = {
        "frozen": lambda place: not place.trainable,
        "tied": lambda place: place.name in tied,
    }
    for kind, inside in kinds.items():
        if all(map(inside, touched)):
            return Where(f"{words} ({kind})", len(touched) > 1)
    return Where(words, len(touched) > 1)


def _some(names: Sequence[str], rest: str) -> str:
    if len(names) <= MOST_NAMES:
        return listed(names)
    return f"{', '.join(names[:MOST_NAMES])} and {len(names) - MOST_NAMES} {rest}"


def _shards(
    mask: torch.Tensor, holds: torch.Tensor, telling: torch.Tensor, scopes: Sequence[Scope]
) -> Where | None:
    """Return the shards whose elements these are, or None."""
    kinds = dict.fromkeys(scope.words for scope in scopes)
    for words in kinds:
        inside = [
            scope
            for scope in scopes
            if scope.words == words
            and bool((scope.mask & mask).any())
            and bool(holds[scope.mask & telling].all())
        ]
        union = torch.zeros_like(mask)
        for scope in inside:
            union |= scope.mask
        if inside and not bool((mask & ~union).any()) and not bool(union.all()):
            ranks = [scope.rank for scope in inside]
            noun = "the shard" if len(ranks) == 1 else "the shards"
            text = f"{noun} of {ranks_words(ranks)} {words}".rstrip()
            return Where(text, len(ranks) > 1, tuple(ranks))
    return None


def _ranges(mask: torch.Tensor, holds: torch.Tensor, touched: Sequence[ParameterPlace]) -> Where:
    """Return ranges of tensors. Elements between, at which it is right too, do not split them."""
    groups: list[list[str]] = []
    end = -1
    for place in touched:
        inside, right = mask[place.start : place.stop], holds[place.start : place.stop]
        for start, stop in _runs(inside, right):
            if place.start + start != end:
                groups.append([])
            groups[-1].append(_range(place, start, stop))
            end = place.start + stop
    found: list[str] = []
    for group in groups:
        several = len(group) > MOST_NAMES
        found += [f"everything from {group[0]} to {group[-1]}"] if several else group
    return Where(_some(found, "ranges"), len(found) > 1)


def _runs(inside: torch.Tensor, right: torch.Tensor) -> list[tuple[int, int]]:
    """Return runs [start, stop) of right elements, without what follows their last one inside."""
    positions = inside.nonzero().reshape(-1)
    broken = (~right).to(torch.int64).cumsum(0)[positions]
    starts = torch.cat((torch.ones(1, dtype=torch.bool), broken.diff() > 0))
    first = positions[starts]
    last = positions[torch.cat((starts[1:], torch.ones(1, dtype=torch.bool)))]
    return list(zip(first.tolist(), (last + 1).tolist(), strict=True))


def _range(place: ParameterPlace, start: int, stop: int) -> str:
    size = place.stop - place.start
    if (start, stop) == (0, size):
        return place.name
    row = math.prod(place.shape[1:])
    if row and start % row == 0 and stop % row == 0:
        return f"{place.name}{_span(start // row, stop // row)}"
    return f"{place.name}.flatten(){_span(start, stop)}"


def _span(start: int, stop: int) -> str:
    return f"[{start}]" if stop - start == 1 else f"[{start}:{stop}]"
