"""Changes of a step that SGD alone may have."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ... import causes as bugs
from ...floating_point import U
from ..specification import Change, SegmentStep


def changes(step: SegmentStep) -> Iterator[Change]:
    """Iterate over them."""
    e, s = step.elements, step.scalars
    if not s.momentum:
        return
    if step.role == "parameter":
        plain = msgspec.structs.replace(step.segment.options, momentum=0.0, nesterov=False)
        words = "along the gradient, and not along the momentum buffer"
        yield step.change(bugs.MOMENTUM_LEFT_OUT, words, step.with_(options=plain))
        # Where the gradient is 0 the buffer is right for all that.
        words = "with lr of 1: the buffer is to have it"
        yield step.change(bugs.LEARNING_RATE_IN_THE_MOMENTUM, words, step.with_(lr=1.0))
        return
    for cause, words, factor in (
        (bugs.GRADIENT_DAMPENED, "with the gradient times 1 - momentum", 1 - s.momentum),
        (bugs.LEARNING_RATE_IN_THE_MOMENTUM, "with the gradient times lr", s.lr),
    ):
        scalars = s._replace(weight_decay=s.weight_decay * factor)
        gradient = e.gradient * factor
        size = gradient.abs() + (scalars.weight_decay * e.parameter).abs()
        error = abs(factor) * e.error + 4 * (U if not e.format.narrow else e.format.u) * size
        yield step.change(cause, words, scalars, gradient=gradient, error=error)
