"""Cases for DeepSpeed's stages: what its partitions, hooks and buckets can get wrong."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import msgspec
import pytest

from zerocheck.adapters.deepspeed.options import stored_as
from zerocheck.case.schema import Case, Sharding, Start, Training

from ..cases import CASES

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed; tox has it"
)

Options = dict[str, Any]
SMALL_BUCKETS = Sharding(bucket=16), stored_as({"prefetch_bucket": 0, "max_live_parameters": 1})
OVERLAPPED = (
    Sharding(bucket=64),
    stored_as(
        {
            "overlap_comm": True,
            "round_robin_gradients": True,
            "persistence_threshold": 16,
            "own_optimizer": True,
        }
    ),
)
SCATTERED = (
    Sharding(bucket=40),
    stored_as({"contiguous_gradients": False, "reduce_scatter": False, "prefetch_bucket": 64}),
)
PLAIN: tuple[Sharding, Options] = Sharding(), {}

CHOSEN: dict[str, tuple[str, tuple[Sharding, Options]]] = {
    "groups": ("groups", SMALL_BUCKETS),
    "microbatches": ("microbatches", OVERLAPPED),
    "mixed": ("mixed", SCATTERED),
    "twice": ("twice", PLAIN),
    "tied": ("tied", SMALL_BUCKETS),
    "frozen": ("frozen", OVERLAPPED),
    "unused": ("unused", SCATTERED),
    "restore": ("restore", SMALL_BUCKETS),
    "checkpointed": ("checkpointed", PLAIN),
    "one_wide": ("one_wide", OVERLAPPED),
    "clip_inactive": ("clip_inactive", SMALL_BUCKETS),
}
"""Name -> the case of that name in cases.py, and the sharding and options that it is run with."""


KEY = ("groups", "microbatches", "mixed", "tied", "unused", "restore")
"""Those of a slice."""


def chosen(name: str, world_size: int) -> Case:
    """The case on so many ranks."""
    case, (sharding, options) = CHOSEN[name]
    mesh = (world_size,)
    return msgspec.structs.replace(CASES[case], mesh=mesh, sharding=sharding, options=options)


EVERYTHING = Case(
    mesh=(3,),
    model=CASES["mixed"].model,
    start=Start(step=255, moments="typical"),
    optimizer=CASES["groups"].optimizer,
    training=Training(steps=2, microbatches=3, clip=0.05),
    sharding=OVERLAPPED[0],
    options=OVERLAPPED[1],
)
"""Groups, clipping, accumulation and a start in mid-training at once."""
