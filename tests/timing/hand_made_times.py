"""Times of ranks, made by hand: a step is 1,000 ns long unless it says otherwise."""

from __future__ import annotations

from zerocheck.protocol.measurements import CollectiveTimes, StepTimes, Timed

CLOCK = "a clock"


def call(
    kind: str,
    begun: int,
    returned: int,
    over: int,
    *,
    stalled: int | None = None,
    size: int = 400,
    ranks: int = 2,
    root: int = -1,
) -> CollectiveTimes:
    """A collective that nobody waits for after it returned, unless `stalled` is given."""
    return CollectiveTimes(
        kind, size, ranks, root, begun, returned, over if stalled is None else stalled, over
    )


def step(*calls: CollectiveTimes, ended: int = 1000, **given: int) -> StepTimes:
    """One step of one rank."""
    return StepTimes(0, ended, **given, calls=calls)


def rank(*steps: StepTimes, **given: object) -> Timed:
    """All steps of one rank."""
    return Timed(**{"steps": steps, "clock": CLOCK, **given})  # type: ignore[arg-type]
