"""Words for a set of tensors: their class, or their names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from ..layout import ParameterLayout, ParameterPlace


def classes(noun: str) -> Iterator[tuple[str, Callable[[ParameterPlace], bool]]]:
    """Iterate over (words, membership) of classes of tensors. noun: of any tensor."""
    yield f"every {noun}", lambda place: True
    yield f"every trained {noun}", lambda place: place.trainable
    yield f"every frozen {noun}", lambda place: not place.trainable
    yield f"every {noun} that is not contiguous", lambda place: place.strides is not None
    yield "every matrix", lambda place: len(place.shape) >= 2
    yield "every bias", lambda place: place.name.rpartition(".")[2].startswith("bias")
    yield "every vector", lambda place: len(place.shape) == 1
    yield "every scalar", lambda place: not place.shape


def tensors(names: Collection[str], layout: ParameterLayout) -> str:
    """Return "every tensor", the class that these tensors are, or their names.

    A class of one or two is named instead; so is what no class is.
    """
    places = [place for place in layout.places if place.stop > place.start]
    chosen = [place for place in places if place.name in names]
    if len(chosen) == len(places):
        return "every tensor"
    trained = [place for place in places if place.trainable]
    pools = ((places, ""), (trained, " that is trained")) if len(chosen) > 2 else ()
    for pool, which in pools:
        for words, belongs in (*classes("tensor"), *_parts(chosen)):
            if [place for place in pool if belongs(place)] == chosen:
                return words + which
    shown = [place.name for place in chosen[:3]]
    more = len(chosen) - len(shown)
    return ", ".join(shown) + (f" and {more} more tensors" if more else "")


def _parts(
    chosen: Sequence[ParameterPlace],
) -> Sequence[tuple[str, Callable[[ParameterPlace], bool]]]:
    """Return the module and the block that all these tensors may be in, as classes."""
    prefix = chosen[0].name.split(".")
    for place in chosen[1:]:
        parts = place.name.split(".")
        common = 0
        while common < min(len(parts), len(prefix)) and parts[common] == prefix[common]:
            common += 1
        prefix = prefix[:common]
    if not prefix:
        return ()
    start = ".".join(prefix)
    return ((f"every tensor of {start}", lambda place: place.name.startswith(f"{start}.")),)


def numbered(numbers: Collection[int], noun: str) -> str:
    """Return "rank 1", "ranks 0 and 2" or "ranks 1 to 5"."""
    chosen = sorted(numbers)
    if len(chosen) == 1:
        return f"{noun} {chosen[0]}"
    several = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    if len(chosen) > 2 and chosen == list(range(chosen[0], chosen[-1] + 1)):
        return f"{several} {chosen[0]} to {chosen[-1]}"
    return f"{several} {', '.join(map(str, chosen[:-1]))} and {chosen[-1]}"
