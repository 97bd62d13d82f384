"""Timings of a case: a few figures, as the journal holds them, and what they point to, in words.

No verdict depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, prod
from statistics import median

import msgspec

from ..case.schema import Case
from ..case.shapes import (
    call_order,
    learning,
    parameter_bytes,
    parameter_dtypes,
    parameter_shapes,
    sometimes_used,
    uncalled,
)

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
"""Kinds of collectives that reduce gradients."""


class Kind(msgspec.Struct, frozen=True, array_like=True):
    """Collectives of one kind.

    kind: as of `protocol.layout.Call`; calls: of one rank in a step, median over ranks and steps;
    bytes: median of a call; largest: bytes of the largest one; share: time that callers wait in
    them over the time of the step, summed over ranks, median over steps, or None where it is not
    seen (`drive.timed_collectives`).
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


def patterns(case: Case, pace: Pace) -> tuple[str, ...]:
    """Return one sentence for each pattern that the case shows.

    Only where a limit follows from what the case asks. None can be derived for slow collectives or
    long waits for a rank: machines differ. Reports show those figures, and no verdict.
    """
    if case.world_size == 1 or not pace.steps:
        return ()
    found = (_one_by_one(case, pace), _whole_bucket(case, pace), _whole_gather(case, pace))
    return tuple(sentence for sentence in found if sentence is not None)


def _one_by_one(case: Case, pace: Pace) -> str | None:
    """Detect that every trained tensor is reduced alone, where the case allows fewer calls.

    Units of one layer each, the finest `sharding.wrap`, are as many as there are modules with
    parameters. Buckets that are filled in order until the next tensor does not fit are at most
    2 E / b + 1 for E elements and buckets of b, since two neighbours hold more than b together; and
    one more for each dtype. So more tensors than both are more collectives than any setting asks
    for.
    """
    shapes, dtypes = parameter_shapes(case.model), parameter_dtypes(case.model)
    names = [name for name in learning(case) if prod(shapes[name])]
    layers = len({name.rpartition(".")[0] for name in names})
    elements = sum(prod(shapes[name]) for name in names)
    buckets = 2 * elements / case.sharding.bucket + len({dtypes[name] for name in names})
    if pace.alone < len(names) or len(names) <= max(layers, buckets):
        return None
    reducing = [kind for kind in pace.kinds if kind.kind in REDUCING]
    most = max(reducing, key=lambda kind: kind.calls)
    return (
        "too many small collectives: one reduction for each parameter tensor: "
        f"{most.calls:g} of a median of {most.bytes:,.0f} bytes in a step, for {layers} layers"
    )


def _whole_bucket(case: Case, pace: Pace) -> str | None:
    """Detect fewer reductions than buckets asked for, in code that obeys `bucket`.

    A bucket that is closed once it holds b elements has fewer than b and the largest tensor t, so
    E elements are more than E / (b + t) buckets, whatever they are padded with. An element is 4
    bytes, as DDP counts; parameters that some step may not use are left out. With `wrap` the
    buckets are units, of any size.
    """
    if "bucket" not in pace.obeys or "wrap" in pace.obeys:
        return None
    whole = parameter_bytes(case.model)
    unsure = (*uncalled(case.model), *sometimes_used(case.model))
    sizes = [whole[name] for name in learning(case) if not name.startswith(unsure)]
    reducing = [kind for kind in pace.kinds if kind.kind in REDUCING]
    calls = sum(kind.calls for kind in reducing)
    needed = sum(sizes) / (4 * case.sharding.bucket + max(sizes, default=0))
    if not calls or calls >= needed:
        return None
    largest = max(kind.largest for kind in reducing)
    return (
        f"a bucket that spikes memory: {calls:g} reductions in a step, the largest of {largest:,} "
        f"bytes, where buckets of {case.sharding.bucket:,} elements need {ceil(needed)} at least"
    )


def _whole_gather(case: Case, pace: Pace) -> str | None:
    """Detect that all parameters are gathered at once, by code that obeys `wrap`.

    The bytes of all parameters are then gathered in fewer all-gathers than there are units. Each
    block that is called is a unit at least, and the stem with the head another, and each is
    gathered once in a step at least. Bytes alone are not enough: a unit of a tiny model may be
    padded to more than the model. Units by size and the user's own models are not covered.
    """
    asked = case.sharding.wrap
    if "wrap" not in pace.obeys or asked not in ("block", "layer") or case.model.user is not None:
        return None
    sizes = parameter_bytes(case.model)
    called = {f"blocks.{index}" for index in call_order(case.model)}
    units = {".".join(name.split(".")[:2]) for name, size in sizes.items() if size} & called
    whole = sum(sizes.values())
    gathers = [kind for kind in pace.kinds if kind.kind == "all_gather"]
    if not gathers or gathers[0].largest < whole or gathers[0].calls >= len(units) + 1:
        return None
    return (
        f"a wrapping that gathers too much: one all-gather of {gathers[0].largest:,} bytes, the "
        f"model has {whole:,}, where {len(units) + 1} units or more are asked for"
    )


def middle_of(values: Iterable[float | None]) -> float | None:
    """Return the median of the figures that are known, None without one."""
    known = [value for value in values if value is not None]
    return median(known) if known else None
