"""Sentence of what a wrong reduced gradient is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..diagnose.evidence import Evidence, Vectors, wrong_tensors
from .by_use import Parts, by_use
from .exchanged import exchanged
from .gradient import GradientSearch, sentences
from .mixtures import mixtures
from .roundings import rounded_terms, scaled_losses, weighted_losses
from .tensors import tensors


class GradientAttribution(NamedTuple):
    """Sentence about a wrong vector."""

    sentence: str
    """One clause for each part, "" where nothing explains any."""
    complete: bool
    """True if every wrong tensor is explained."""


def attribution(
    evidence: Evidence, others: Vectors, uses: Callable[[], Parts] = dict
) -> GradientAttribution:
    """Say what a wrong gradient is made of.

    others: see `Vectors`; uses: asked for the parts of gradients of parameters with several uses.
    """
    wrong = wrong_tensors(evidence)
    layout = evidence.layout
    search = GradientSearch(evidence, wrong, others)
    parts, explained = exchanged(search)
    search.explain(explained)

    def look(for_what: Callable[[GradientSearch], tuple[str, Sequence[int]] | None]) -> None:
        found = for_what(search) if search.open else None
        if found is not None:
            words, explained = found
            names = {search.cells[number].place.name for number in explained}
            parts.append(f"gradient of {tensors(names, layout)}: {words}")
            search.explain(explained)

    look(weighted_losses)
    search.run()
    if search.open:
        by_uses, explained = by_use(search, uses())
        parts += [f"gradient of {tensors(n, layout)}: {text}" for text, n in by_uses.items()]
        search.explain(explained)
    look(scaled_losses)
    look(rounded_terms)
    if search.open:
        mixed, explained = mixtures(search)
        parts += mixed
        search.explain(explained)
    search.run_on()
    parts = [
        *(f"gradient of {tensors(n, layout)}: {text}" for text, n in sentences(search).items()),
        *parts,
    ]
    complete = not search.open
    if parts and not complete:
        left = {search.cells[number].place.name for number in search.open}
        parts.append(f"gradient of {tensors(left, layout)}: not explained")
    return GradientAttribution("; ".join(parts), complete)
