"""Faults that only several hosts show."""

from __future__ import annotations

from ... import causes as bugs
from .fault import fault

HOSTS = [
    fault(
        "hosts:LocalRankForRank", "zero3", "ownership",
        "the local rank chooses the shard", "DS PR#7601",
        bugs.SHARD_OF_THE_LOCAL_RANK, world=3, features=("hosts",),
    ),
    fault(
        "hosts:DividedByLocalWorldSize", "zero1", "gradient",
        "the sum over ranks is divided by the number of ranks on a host", "seen often",
        bugs.DIVIDED_BY_THE_RANKS_OF_A_HOST, world=3, features=("hosts",),
    ),
    fault(
        "hosts:ReducedWithinHost", "zero1", "gradient",
        "gradients are not reduced between hosts", "seen often",
        bugs.REDUCED_WITHIN_EACH_HOST, world=3, features=("hosts",),
    ),
]  # fmt: skip
