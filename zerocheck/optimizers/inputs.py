"""Gradients that a step may be given in place of the right one."""

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
