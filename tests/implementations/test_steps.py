"""Every built-in implementation takes the right step, on every kind of case."""

from __future__ import annotations

import pytest

from zerocheck.contract import Implementation
from zerocheck.implementations.ddp import Ddp
from zerocheck.implementations.fsdp2 import Fsdp2
from zerocheck.implementations.textbook.zero1 import Zero1
from zerocheck.implementations.textbook.zero2 import Zero2
from zerocheck.implementations.textbook.zero3 import Zero3

from .cases import CASES, on
from .driver import Seen, in_ranks, observe_all
from .oracle import check

WIDE = ("plain", "groups", "microbatches", "clip", "twice", "tied", "frozen", "unused")
"""Cases that run on five ranks too."""

UNFIT = {Ddp: ("tiny_clip",), Fsdp2: ("tiny_clip",)}
"""torch's own norm squares in fp32, where the square of a gradient below 1e-22 is 0."""

RUNS: list[tuple[type[Implementation], str]] = [
    (Ddp, "block"),
    (Zero1, "block"),
    (Zero1, "layer"),
    (Zero2, "block"),
    (Zero2, "layer"),
    (Zero2, "block_kept"),
    (Zero3, "block"),
    (Zero3, "layer"),
    (Zero3, "whole"),
    (Zero3, "block_kept"),
    (Zero3, "layer_alone"),
    (Zero3, "layer_kept"),
    (Fsdp2, "block"),
    (Fsdp2, "layer"),
    (Fsdp2, "whole"),
    (Fsdp2, "layer_kept"),
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", list(dict.fromkeys(kind for kind, _ in RUNS)))
def test_steps(kind: type[Implementation], world_size: int) -> None:
    jobs = [
        (name, sharding, on(case, world_size, sharding))
        for its, sharding in RUNS
        if its is kind
        for name, case in CASES.items()
        if (world_size in (2, 3) or name in WIDE) and name not in UNFIT.get(kind, ())
    ]
    ranks = in_ranks(world_size, observe_all, [(kind, case) for _, _, case in jobs])
    wrong = []
    for number, (name, sharding, case) in enumerate(jobs):
        seen: list[Seen] = [rank[number] for rank in ranks]
        try:
            assert not isinstance(seen[0], str), seen[0]
            check(case, kind.semantics, seen)
        except AssertionError as error:
            wrong.append(f"{name} / {sharding}: {error}")
    assert not wrong, "\n".join(wrong)
