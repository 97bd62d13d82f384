"""Cases whose memory and collectives can be measured, and the step from which they repeat."""

from __future__ import annotations

from .schema import Case

UNMEASURED = (
    "torch compiles nothing under a dispatch mode, by which memory and collectives are followed "
    "(training.compile)"
)
"""Why the memory of a compiled model is not judged."""

UNTOLD = (
    "what DTensors hold and call within sharded layers is not predicted yet "
    "(sharding.tensor_parallel)"
)
"""Why memory and collectives of tensor parallelism are not judged."""


def unmeasured(case: Case) -> str | None:
    """Return the reason why memory obligations are not judged for the case, or None."""
    if case.training.compile != "none":
        return UNMEASURED
    return UNTOLD if case.axes.has("tp") else None


def settled(case: Case) -> int:
    """Return the index of the first step after which no new kind of state is allocated.

    The first step makes the optimizer's state, and so does the one that unfreezes parameters; not
    if it overflows, which puts it off.
    """
    training = case.training
    first = training.first if training.unfreeze is None else max(training.first, training.unfreeze)
    return first + (training.overflow == first)
