"""Every built-in implementation takes the right step, on every kind of case."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from slices import sliced

from zerocheck.adapters.ddp.adapter import Ddp
from zerocheck.adapters.fsdp1.adapter import Fsdp1, Fsdp1GradOp, Fsdp1NoShard
from zerocheck.adapters.fsdp2.adapter import Fsdp2
from zerocheck.adapters.textbook.zero1 import Zero1
from zerocheck.adapters.textbook.zero2 import Zero2
from zerocheck.adapters.textbook.zero3 import Zero3
from zerocheck.adapters.zero_redundancy.adapter import ZeroRedundancy
from zerocheck.contract import Implementation

from .cases import CASES, on
from .driver import in_ranks, observe_all
from .oracle import check

SHARDINGS: dict[type[Implementation], tuple[str, ...]] = {
    Ddp: ("block", "views", "first"),
    ZeroRedundancy: ("views", "block", "first"),
    Fsdp1: ("layer", "flat", "size", "first"),
    Fsdp1GradOp: ("flat", "block", "each"),
    Fsdp1NoShard: ("block", "flat", "each"),
    Zero1: ("block", "layer"),
    Zero2: ("layer", "whole", "block_kept"),
    Zero3: ("layer", "block", "whole", "block_kept", "layer_alone", "layer_kept"),
    Fsdp2: ("layer", "block", "whole", "layer_kept", "size", "each", "offloaded"),
}
"""All cases run with the first sharding, those of KEY with the second too, FEW with the rest."""

KEY = (
    "groups",
    "microbatches",
    "twice",
    "tied",
    "frozen",
    "unused",
    "mixed",
    "experts",
    "checkpointed",
    "shapes",
)
FEW = ("groups", "microbatches", "mixed")
WIDE = ("clip", "clip_inf", "one_wide", *KEY)
"""Cases that run on other numbers of ranks too."""
SMALLER = ("one_wide", "mixed", "experts", "shapes")
"""Cases that run on 5 ranks in any case: parameters are smaller than the world."""

FSDP1_REFUSES = (
    "groups",
    "frozen",
    "fused",
    "tied",
    "shapes",
    "shapes_inf",
    "experts",
    "experts_one",
)
REFUSED: dict[type[Implementation], tuple[str, ...]] = {
    Ddp: ("all_frozen", "shapes_inf"),
    ZeroRedundancy: ("all_frozen", "shapes_inf"),
    **dict.fromkeys((Fsdp1, Fsdp1GradOp, Fsdp1NoShard), FSDP1_REFUSES),
    Fsdp2: ("clip_inf", "shapes", "shapes_inf"),
}
"""Cases that may be refused, with a reason."""

UNFIT: dict[type[Implementation], tuple[str, ...]] = dict.fromkeys(
    (Ddp, ZeroRedundancy, Fsdp1, Fsdp1GradOp, Fsdp1NoShard, Fsdp2), ("tiny_clip",)
)
"""torch's own norm squares in fp32, where the square of a gradient below 1e-22 is 0."""
UNFIT[ZeroRedundancy] = ("tiny_clip", "shapes")  # zero-redundancy-transposed-bucket-view.md


def _chosen(kind: type[Implementation], number: int, world_size: int) -> Collection[str]:
    """Names of the cases that run with the sharding of this number, the first being 0.

    Of a slice a kind runs every fourth of the cases, on other numbers of ranks every second of the
    few, and the next kind the ones beside them.
    """
    place = list(SHARDINGS).index(kind)
    if world_size != 3:
        return sliced(WIDE, SMALLER[place % 2 :: 2]) if number == 0 else ()
    if number == 0:
        return sliced(list(CASES), list(CASES)[place % 4 :: 4])
    own = (place + number) % len(KEY)
    return sliced(KEY if number == 1 else FEW, KEY[own : own + 2] if number == 1 else KEY[own:][:1])


@pytest.mark.every(8)
@pytest.mark.parametrize("world_size", sliced([1, 2, 3, 5], [1, 3, 5]))
@pytest.mark.parametrize("kind", SHARDINGS)
def test_steps(kind: type[Implementation], world_size: int) -> None:
    jobs = [
        (name, sharding, on(case, world_size, sharding))
        for number, sharding in enumerate(SHARDINGS[kind])
        for name, case in CASES.items()
        if name in _chosen(kind, number, world_size)
        if name not in UNFIT.get(kind, ())
    ]
    ranks = in_ranks(world_size, observe_all, [(kind, case) for _, _, case in jobs])
    wrong = []
    for number, (name, sharding, case) in enumerate(jobs):
        seen = [rank[number] for rank in ranks]
        if isinstance(seen[0], str):
            assert name in REFUSED.get(kind, ()), f"{name}: {seen[0]}"
            continue
        try:
            check(case, seen)
        except AssertionError as error:
            wrong.append(f"{name} / {sharding}: {error}")
    assert not wrong, "\n".join(wrong)


def _no_division(self: Zero1) -> None:
    self.world_size = 1
    Zero1._reduce(self)


def _stale(self: Zero1) -> None:
    pass


@pytest.mark.parametrize(("method", "fault"), [("_reduce", _no_division), ("_publish", _stale)])
def test_the_oracle_sees_a_fault(method: str, fault: object) -> None:
    case = on(CASES["plain"], 2, "block")
    broken = type("Broken", (Zero1,), {method: fault})
    ranks = in_ranks(2, observe_all, [(broken, case)])
    with pytest.raises(AssertionError):
        check(case, [rank[0] for rank in ranks])
