"""Changes of a step that Adagrad or RMSprop alone may have."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec
import torch

from ... import causes as bugs
from ...floating_point import Enclosure
from ..specification import Change, SegmentStep
from . import bounds


def changes(step: SegmentStep, squares: str) -> Iterator[Change]:
    """Iterate over them. squares: role of the sum or the average of squares."""
    e, s, role = step.elements, step.scalars, step.role
    if role == "parameter" and s.momentum:
        plain = msgspec.structs.replace(step.segment.options, momentum=0.0)
        words = "along the gradient, and not along the momentum buffer"
        yield step.change(bugs.MOMENTUM_LEFT_OUT, words, step.with_(options=plain))
    elif role != squares:
        v = e.new[squares]
        inside = (v + s.eps).sqrt() - s.eps  # whose square with eps outside is v + eps inside
        new = {**e.new, squares: inside.clamp(min=0.0) ** 2}
        words = "with eps inside of the root"
        yield Change(bugs.EPS_INSIDE_THE_ROOT, words, partial(_inside, step, new))
    if role == "momentum_buffer":
        made = partial(_times_lr, step, squares)
        yield Change(bugs.LEARNING_RATE_IN_THE_MOMENTUM, "with the gradient times lr", made)


def _inside(step: SegmentStep, new: dict[str, torch.Tensor]) -> Enclosure | None:
    made = step.take(new=new)
    if made is None:
        return None
    return Enclosure(made.exact, made.bound + 6 * step.elements.format.u * made.exact.abs())


def _times_lr(step: SegmentStep, squares: str) -> Enclosure:
    e, s = step.elements, step.scalars
    d = bounds.direction(e.parameter, e.gradient, s, e.error, e.format)
    n = bounds.quotient(d, e.new[squares], s, e.format, s.lr)
    exact = s.momentum * e.old["momentum_buffer"] + n.exact
    return Enclosure(exact, n.error + 4 * e.format.u * (exact.abs() + n.exact.abs()))
