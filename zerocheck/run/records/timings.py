"""Timings of a case: a few figures, as the journal holds them. No verdict depends on them."""

from __future__ import annotations

import msgspec

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
"""Kinds of collectives that reduce gradients."""


class Kind(msgspec.Struct, frozen=True, array_like=True):
    """Collectives of one kind.

    kind: as of `contract.layout.Call`; calls: of one rank in a step, median over ranks and steps;
    bytes: median of a call; largest: bytes of the largest one; share: time that callers wait in
    them over the time of the step, summed over ranks, median over steps, or None where it is not
    seen (`drive.timing`).
    """

    kind: str
    calls: float
    bytes: float
    largest: int
    share: float | None = None


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Timings of the steps of one case, in a run of its own with nothing observed.

    steps: that count, without the warm-up; seconds: of a step on its slowest rank; tokens:
    positions that all ranks together read in a step (batch x length x microbatches x ranks),
    0 where batches are the user's own; forward: time within forwards over the time of the step;
    update: that after `step.reached("reduced")`, None where it was not called; copied: that in
    copies between devices; kinds: by the share of callers' time, the greatest first.

    overlap: of the time in which at least one collective was on its way, from the call of its
    operator until it was over, the share in which the caller did not wait, summed over ranks; None
    without collectives. idle: of each rank, time in which it waits in a collective that cannot be
    over since a rank that it needs has not begun it, over the time of the step; empty where ranks
    have no common clock, or call different collectives. Times over ranks are sums; all figures are
    medians over steps, but bytes.

    alone: trained parameter tensors that are reduced in a call of their own, by its bytes;
    allocated, reserved: bytes, the most of any rank, by the accelerator's allocator; obeys: fields
    of `case.sharding`; broken: why nothing was timed.
    """

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    forward: float = 0.0
    update: float | None = None
    copied: float = 0.0
    kinds: tuple[Kind, ...] = ()
    overlap: float | None = None
    idle: tuple[float, ...] = ()
    alone: int = 0
    allocated: int | None = None
    reserved: int | None = None
    obeys: tuple[str, ...] = ()
    broken: str = ""

    @property
    def waiting(self) -> float | None:
        """Share of the step that callers spend in collectives, or None where that is not seen."""
        shares = [kind.share for kind in self.kinds]
        known = [share for share in shares if share is not None]
        return sum(known) if len(known) == len(shares) else None

    @property
    def calls(self) -> float:
        """Number of collectives of one rank in a step."""
        return sum(kind.calls for kind in self.kinds)
