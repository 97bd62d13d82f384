"""Faults in communication. The numbers are right, so that only `communication` detects them."""

from __future__ import annotations

from ... import causes as bugs
from .fault import fault

COMMUNICATION = [
    fault(
        "communication:OneCollectivePerParameter", "ddp", "communication",
        "buckets count as full from the first parameter on", "DS #7418",
        bugs.ONE_COLLECTIVE_PER_PARAMETER, features=("find-unused",),
        without=("bucket-small", "parameter-empty", "static-graph"),
    ),
    fault(
        "communication:AllReduceForReduceScatter", "zero2", "communication",
        "buckets are all-reduced, and all but the own shard is thrown away", "DS #4946",
        bugs.IN_PLACE_OF(other="all_reduce", kind="reduce_scatter"),
    ),
    fault(
        "communication:AllReduceForReduceScatterOfUnits", "zero3", "communication",
        "units are all-reduced, and all but the own shard is thrown away", "DS #4946",
        bugs.IN_PLACE_OF(other="all_reduce", kind="reduce_scatter"),
    ),
    fault(
        "communication:GatheredTwice", "zero2", "communication",
        "updated parameters are gathered twice", "seen often", bugs.GATHERED_TWICE,
    ),
    fault(
        "communication:ReducedWithEachMicrobatch", "zero1", "communication",
        "gradients are reduced with each microbatch, not with the last one", "seen often",
        bugs.REDUCED_WITH_EACH_MICROBATCH, microbatches=2,
    ),
    fault(
        "communication:SentInFp32", "zero1", "communication",
        "gradients in bf16 are sent in fp32", "seen often", bugs.SENT_IN(dtype="float32"),
        features=("mixed-dtypes",),
    ),
    fault(
        "communication:BarrierInEachStep", "zero2", "communication",
        "ranks wait for each other at the end of each step", "seen often", bugs.CALLED_ONCE_MORE,
    ),
]  # fmt: skip
