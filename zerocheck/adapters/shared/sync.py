"""Schedule of gradient reductions (`case.sharding.sync`) for torch's implementations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

from ...case.schema import Case
from ...contract import Semantics


def synchronized(semantics: Semantics, case: Case) -> Semantics:
    """Return semantics whose gradients are reduced as often as the case asks.

    With "shards" the reduction over the replicate axis, where there is one, waits for the last.

    DDP sends the buffers of rank 0 at every forward that follows a reduction.
    """
    if case.sharding.sync == "last":
        return semantics
    buffers: Literal["local", "rank0_each"] = "local"
    if semantics.buffers != "local":
        buffers = "rank0_each"
    each: Literal["reduce_each", "reduce_shards"] = "reduce_each"
    if deferred(case):
        each = "reduce_shards"
    return replace(semantics, accumulate=each, buffers=buffers)


def deferred(case: Case) -> bool:
    """Return True if the reduction over the replicate axis waits for the last microbatch."""
    return case.sharding.sync == "shards" and case.axes.has("replicate")


def accumulation(case: Case) -> Callable[[bool], AbstractContextManager[Any]] | None:
    """Return `accumulate` for `Built`: None to reduce with the last microbatch, else with each."""
    return None if case.sharding.sync == "last" else (lambda last: nullcontext())
