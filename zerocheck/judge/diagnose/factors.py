"""Causes of a gradient that is wrong by one factor: ranks, microbatches or the loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ... import causes as bugs
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
        yield Candidate(name, f"the gradient is {words}loss scale", [enclosure])


def _scaled(evidence: Evidence) -> Iterator[Candidate]:
    for name, factor, words in known_factors(*evidence.passes.gradients.shape[:2]):
        yield Candidate(name, f"the gradient is {words}", [times(evidence, factor)])


def known_factors(world: int, count: int) -> Iterator[tuple[str, float, str]]:
    """Iterate over (cause, factor, words), with so many ranks and microbatches."""
    factors: dict[str, tuple[float, str]] = {}
    if world > 1:
        root = math.sqrt(world)
        factors |= {
            bugs.GRADIENT_TIMES_W: (world, f"W times too large (on {world} ranks: {world})"),
            bugs.GRADIENT_OVER_W: (1 / world, f"W times too small (on {world} ranks: {world})"),
            bugs.GRADIENT_TIMES_ROOT_W: (
                root,
                f"sqrt(W) times too large (on {world} ranks: {root:.4g})",
            ),
            bugs.GRADIENT_OVER_ROOT_W: (
                1 / root,
                f"sqrt(W) times too small (on {world} ranks: {root:.4g})",
            ),
        }
    if count > 1:
        factors |= {
            bugs.GRADIENT_TIMES_GA: (
                count,
                f"GA times too large (with {count} microbatches: {count})",
            ),
            bugs.GRADIENT_OVER_GA: (
                1 / count,
                f"GA times too small (with {count} microbatches: {count})",
            ),
        }
    if count > 1 and world > 1:
        factors[bugs.GRADIENT_TIMES_W_TIMES_GA] = (
            world * count,
            f"W x GA times too large (with {world} x {count}: {world * count})",
        )
    factors[bugs.GRADIENT_DOUBLED] = (2.0, "2 times too large")
    for name, (factor, words) in factors.items():
        yield name, factor, words
