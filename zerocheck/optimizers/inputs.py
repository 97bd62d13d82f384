"""Gradients and options that a step may be given in place of the right ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .. import causes as bugs
from .specification import Segment

_WORDS = {
    bugs.GRADIENT_TIMES_W: "the gradient times W",
    bugs.GRADIENT_OVER_W: "the gradient over W",
    bugs.LOCAL_GRADIENT_ONLY: "one rank's gradient",
}


def gradients(segment: Segment) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over other gradients that a step may be given, by their names in words."""
    g = segment.elements.gradient
    if segment.unclipped is not None:
        yield "the gradient from before clipping", segment.unclipped
    if segment.previous is not None and bool((segment.previous != g).any()):
        yield "the gradient of the step before", segment.previous
    for gradient in segment.in_memory:
        yield "the gradient with elements in the order of memory", gradient
    for name, gradient in segment.gradients():
        if bool((gradient != g).any()):
            yield _WORDS.get(name, "another gradient"), gradient
    yield "the gradient rounded to bf16", g.bfloat16().double()
    yield "the gradient rounded to fp16", g.half().double()


def factors(segment: Segment) -> Iterator[tuple[str, float]]:
    """Iterate over factors that an option may have: numbers of ranks, and that of microbatches."""
    ranks = [(number, "ranks") for number in dict.fromkeys(segment.ranks)]
    for number, words in (*ranks, (segment.microbatches, "microbatches")):
        if number > 1:
            yield f"times {number}, a number of {words}", float(number)
            yield f"over {number}, a number of {words}", 1 / number


def scaled(segment: Segment, *options: str) -> Iterator[dict[str, float]]:
    """Iterate over these options of the scalars with such factors, one at a time."""
    for option in options:
        value = getattr(segment.scalars, option)
        if value:
            yield from ({option: value * factor} for _, factor in factors(segment))


def other_rates(segment: Segment) -> Iterator[tuple[str, str, float]]:
    """Iterate over (cause, words, learning rate) of rates that a step may have but for its own."""
    lr = segment.scalars.lr
    for rate in segment.rates:
        if rate != lr:
            yield bugs.LEARNING_RATE_OF_ANOTHER_STEP, f"of another step ({rate:.6g})", rate
    for words, factor in factors(segment) if lr else ():
        yield bugs.OPTION_SCALED, words, lr * factor


def rates(segment: Segment, right: str, unit: float) -> dict[str, float]:
    """Return the coefficients of an update with another learning rate, by their names.

    right: name of the right one; unit: what it is where the rate is 1.
    """
    found = {f"{right} with lr {words}": unit * rate for _, words, rate in other_rates(segment)}
    for group, rate in segment.others:
        if rate != segment.scalars.lr:
            found[f"{right} with lr of another group ({group.pattern!r})"] = unit * rate
    return found
