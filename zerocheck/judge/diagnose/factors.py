"""Causes of a gradient that is wrong by one factor: ranks, microbatches or the loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ... import causes as bugs
from ...contract.semantics import Semantics
from .evidence import Candidate, Evidence, times


def candidates(evidence: Evidence) -> Iterator[Candidate]:
    """Iterate over gradients that are a factor too large or too small."""
    yield from _scaled(evidence)
    yield from _by_loss_scale(evidence)


def _by_loss_scale(evidence: Evidence) -> Iterator[Candidate]:
    """Gradients from which the loss scale was divided out wrongly."""
    scale = evidence.loss_scale
    if evidence.case.training.loss_scale is None:
        return
    wrong = [
        (
            bugs.UNSCALED_BY_ANOTHER_SCALE,
            0.5,
            "half of what it must be: it was divided by twice the ",
        ),
        (bugs.UNSCALED_BY_ANOTHER_SCALE, 2.0, "2 times too large: it was divided by half of the "),
    ]
    if scale != 1.0:
        wrong += [
            (bugs.NOT_UNSCALED, scale, f"{scale:g} times too large: it was not divided by the "),
            (
                bugs.UNSCALED_TWICE,
                1 / scale,
                f"{scale:g} times too small: it was divided twice by the ",
            ),
        ]
    for name, factor, words in wrong:
        enclosure = times(evidence, factor)
        yield Candidate(name, f"gradient is {words}loss scale", [enclosure])


def _scaled(evidence: Evidence) -> Iterator[Candidate]:
    world, count = evidence.passes.gradients.shape[:2]
    for name, factor, words in known_factors(world, count, evidence.semantics):
        yield Candidate(name, f"gradient is {words}", [times(evidence, factor)])


def known_factors(world: int, count: int, semantics: Semantics) -> Iterator[tuple[str, float, str]]:
    """Iterate over (cause, factor, words), with so many ranks and microbatches."""
    mean = semantics.average == "mean"
    if world > 1:
        root = math.sqrt(world)
        large = f"{world} times too large"
        small = f"{world} times too small"
        summed = f"summed over {world} ranks, not averaged"
        averaged = f"averaged over {world} ranks, not summed"
        over_root = f"by the square root of the number of ranks ({world})"
        yield (
            bugs.GRADIENT_TIMES_W,
            world,
            f"{large}: {summed if mean else 'multiplied by the number of ranks'}",
        )
        yield (
            bugs.GRADIENT_OVER_W,
            1 / world,
            f"{small}: {'divided by the number of ranks twice' if mean else averaged}",
        )
        yield bugs.GRADIENT_TIMES_ROOT_W, root, f"{root:.4g} times too large: {over_root}"
        yield bugs.GRADIENT_OVER_ROOT_W, 1 / root, f"{root:.4g} times too small: {over_root}"
    if count > 1:
        yield (
            bugs.GRADIENT_TIMES_GA,
            count,
            f"{count} times too large: summed over {count} microbatches, not averaged",
        )
        yield (
            bugs.GRADIENT_OVER_GA,
            1 / count,
            f"{count} times too small: divided by the number of microbatches twice",
        )
    if count > 1 and world > 1:
        number = world * count
        both = f"{world} ranks and {count} microbatches"
        yield (
            bugs.GRADIENT_TIMES_W_TIMES_GA,
            number,
            f"{number} times too large: "
            + (f"summed over {both}, not averaged" if mean else f"multiplied by {both}"),
        )
    yield bugs.GRADIENT_DOUBLED, 2.0, "2 times too large"
