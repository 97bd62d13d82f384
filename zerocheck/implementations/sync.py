"""When gradients are reduced: `case.sharding.sync`, for what torch brings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

from ..case.schema import Case
from ..contract import Semantics


def synchronized(semantics: Semantics, case: Case) -> Semantics:
    """What the implementation means by a step if it reduces as the case says.

    DDP sends the buffers of rank 0 at every forward that follows a reduction.
    """
    if case.sharding.sync == "last":
        return semantics
    buffers: Literal["local", "rank0_each"] = "local"
    if semantics.buffers != "local":
        buffers = "rank0_each"
    return replace(semantics, accumulate="reduce_each", buffers=buffers)


def accumulation(case: Case) -> Callable[[bool], AbstractContextManager[Any]] | None:
    """`accumulate` for `Built`: none, which reduces with the last microbatch, or with each."""
    return (lambda last: nullcontext()) if case.sharding.sync == "each" else None
