"""Faults that only several hosts show."""

from __future__ import annotations

from .fault import fault

HOSTS = [
    fault(
        "hosts:LocalRankForRank", "zero3", "ownership",
        "the local rank chooses the shard", "DS PR#7601",
        "shard of the local rank", world=3, features=("hosts",),
    ),
    fault(
        "hosts:DividedByLocalWorldSize", "zero1", "gradient",
        "the sum over ranks is divided by the number of ranks on a host", "seen often",
        "divided by the ranks of a host", world=3, features=("hosts",),
    ),
    fault(
        "hosts:ReducedWithinHost", "zero1", "gradient",
        "gradients are not reduced between hosts", "seen often",
        "reduced within each host", world=3, features=("hosts",),
    ),
]  # fmt: skip
